"""Position-dependent scaling of queries (Llama 4's attention temperature, arXiv 2501.19399).

    scale(position) = 1 + attn_scale * log(1 + floor((position + 1) / floor_scale)),   in layers without RoPE

Transformers counts positions from the first row of a call.  The rows of a step have arbitrary positions, so
`attend` scales them by a table.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn


def take_over(model: nn.Module, positions: int, device: torch.device, ours: Callable[[], bool]) -> None:
    """Attach the table `query_scales` [positions] to every attention module that scales its queries.

    The module's own scaling is off while `ours()` is true.
    """
    module: Any
    for module in model.modules():
        if getattr(module, "attn_temperature_tuning", False) and not getattr(module, "use_rope", True):
            module.query_scales = _scales(module, positions).to(device)
            module.register_forward_pre_hook(
                lambda module, _: setattr(module, "attn_temperature_tuning", not ours())
            )


def _scales(module: Any, positions: int) -> Tensor:
    at = torch.arange(positions).float() + 1.0
    scales: Tensor = torch.log1p(torch.floor(at / module.floor_scale)) * module.attn_scale + 1.0
    return scales
