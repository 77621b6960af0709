"""Copies to a device that do not wait for what it computes."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """A host tensor on a device.

    CUDA has read memory that is not pinned when it returns.  Elsewhere a copy under way could outlive the
    tensor.
    """
    return tensor.to(device, non_blocking=device.type == "cuda")


def take(x: Tensor, rows: Sequence[int]) -> Tensor:
    """Some rows of x, ascending."""
    return (
        x
        if len(rows) == len(x)
        else x.index_select(0, to_device(torch.tensor(rows, dtype=torch.int64), x.device))
    )
