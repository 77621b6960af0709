"""Length-dependent RoPE scaling of transformers' modules, fixed to one set of frequencies."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


def fix_ropes(model: nn.Module, max_len: int) -> None:
    """Apply `fix_rope` to every RoPE module of a model."""
    for module in model.modules():
        if isinstance(getattr(module, "rope_type", None), (str, dict)):
            fix_rope(module, max_len)


def fix_rope(module: Any, max_len: int) -> None:
    """Compute a length-dependent scaling (dynamic, longrope) for `max_len` tokens, once for all calls.

    This makes the rotation of a token independent of other positions.  A module has one RoPE type, or a dict
    with one per kind of layer.
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
