"""Elementwise functions of torch whose results do not depend on the number of rows.

torch computes the end of a tensor, and parts for several threads, in another loop than the rest.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

VECTOR = 32  # numbers that torch computes at once
SERIAL_NUMEL = 16384  # up to this many numbers torch does not split a call among threads


def by_rows(func: Callable[..., Tensor], x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Call func on as many rows at a time as make whole vectors on one thread."""
    width = x.shape[-1]
    rows = x.reshape(-1, width).contiguous()  # rows that lie apart take another loop
    step = 1 if width % VECTOR else max(1, SERIAL_NUMEL // width)
    if len(rows) <= step:
        return func(rows, *args, **kwargs).view(x.shape)
    parts = [func(rows[i : i + step], *args, **kwargs) for i in range(0, len(rows), step)]
    return torch.cat(parts).view(x.shape)
