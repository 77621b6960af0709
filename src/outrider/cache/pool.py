"""The K/V tensors of one model, addressed by slot.  Which slot belongs to whom is the business of `slots.py`."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class Pool:
    """data [layers, 2, slots, kv_heads, width]: K and V; `width` is the head size rounded up to 32, zero past the head.

    Several pools may share one allocator: a draft model's pool lies at the target's slots.
    """

    def __init__(self, layers: int, kv_heads: int, head_dim: int, slots: int, dtype: torch.dtype, device: torch.device) -> None:
        self.width = -(-head_dim // 32) * 32
        self.data: Tensor = torch.zeros(layers, 2, slots, kv_heads, self.width, dtype=dtype, device=device)
        self.address, self.plane = self.data.data_ptr(), self.data[0, 0].nbytes  # K of layer i is plane 2i, V plane 2i + 1

    @staticmethod
    def bytes_per_slot(layers: int, kv_heads: int, head_dim: int, dtype: torch.dtype) -> int:
        return layers * 2 * kv_heads * (-(-head_dim // 32) * 32) * dtype.itemsize

    def move(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copies slots; reads all before it writes."""
        device = self.data.device
        source, target = torch.tensor(sources, device=device), torch.tensor(targets, device=device)
        self.data[:, :, target] = self.data[:, :, source]
