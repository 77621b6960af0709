"""RoPE of transformers' modules with frequencies that no longer change from call to call."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


def fix_ropes(model: nn.Module, max_len: int) -> None:
    """`fix_rope` for every RoPE module of a model."""
    for module in model.modules():
        if isinstance(getattr(module, "rope_type", None), (str, dict)):
            fix_rope(module, max_len)


def fix_rope(module: Any, max_len: int) -> None:
    """Computes a scaling that depends on the length (dynamic, longrope) for `max_len`, once for all calls.

    So no token depends on another's position.  A module has one type, or a dict with one by kind of layer.
    """
    kinds, device = module.rope_type, next(module.buffers()).device
    last, x = torch.tensor([[max_len - 1]], device=device), torch.zeros(1, device=device)
    if isinstance(kinds, str):
        module(x, last)
        module.rope_type = "default"
        return
    for kind in kinds:
        module(x, last, kind)
    module.rope_type = dict.fromkeys(kinds, "default")
