"""The K/V tensors of one model, addressed by slot.  `pages.py` allocates the slots."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from outrider.cache.states import StatePool
from outrider.core.huge_pages import large_zeros
from outrider.errors import ConfigError


def kv_dtype(name: str, own: torch.dtype) -> torch.dtype:
    """The dtype that `kv_cache_dtype` names, for a model that computes in `own`."""
    if name == "auto":
        return own
    if name == "int8":
        return torch.int8
    fp8 = "; 8-bit floats are not supported, and int8 takes no more memory"
    cure = fp8 if str(name).startswith("fp8") else ""
    raise ConfigError(f"kv_cache_dtype must be 'auto' (the model's dtype) or 'int8', got {name!r}{cure}.")


class Pool:
    """K/V cache of a model: data [layers, 2, slots, kv_heads, row].

    A row is one head in the pool's dtype, zero-padded to a multiple of 32.  In int8 it has four more bytes,
    the float32 scale.  In memory the slots of one head are contiguous.

    head_bytes: from one K/V head to the next.  plane_bytes: from K of a layer to its V, and on to the next K.
    address: of the first byte.  Kept, as a tensor takes 10 µs to tell it right behind a forward.

    states: of the recurrent layers, if the model has some

    Several pools may share one allocator: the pool of a draft model uses the target's slots.
    """

    states: StatePool | None = None
    SLACK = 64  # bytes past the end that a kernel may read, and does not use

    def __init__(
        self, layers: int, kv_heads: int, head_dim: int, slots: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.dtype, self.head_dim, self.width = dtype, head_dim, self.wide(head_dim)
        row = self.width + 4 * (dtype == torch.int8)
        count = layers * 2 * kv_heads * slots * row
        planes = large_zeros(count + self.SLACK, dtype, device)[:count].view(layers, 2, kv_heads, slots, row)
        self.data: Tensor = planes.transpose(2, 3)
        self.head_bytes = slots * row * dtype.itemsize
        self.plane_bytes = kv_heads * self.head_bytes
        self.address = self.data.data_ptr()

    @staticmethod
    def wide(head_dim: int) -> int:
        """Elements of one head in memory: head_dim, rounded up to a multiple of 32."""
        return -(-head_dim // 32) * 32

    @staticmethod
    def bytes_per_slot(layers: int, kv_heads: int, head_dim: int, dtype: torch.dtype) -> int:
        """Bytes of K and V of one token in all layers."""
        return layers * 2 * kv_heads * (Pool.wide(head_dim) * dtype.itemsize + 4 * (dtype == torch.int8))

    @property
    def parts(self) -> Sequence[Pool]:
        """One pool for each device that holds layers."""
        return (self,)

    def move(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copy slots.  Reads all before it writes any."""
        device = self.data.device
        source, target = torch.tensor(sources, device=device), torch.tensor(targets, device=device)
        self.data[:, :, target] = self.data[:, :, source]

    def write(self, layer: int, part: int, slots: Tensor, heads: Tensor) -> None:
        """Write K (part 0) or V (1) of these slots, [m, kv_heads, head_dim].  Not used by the C kernels."""
        if self.dtype != torch.int8:
            self.data[layer, part, slots, :, : self.head_dim] = heads.to(self.dtype)
            return
        step = heads.float().abs().amax(-1, keepdim=True) / 127
        values = torch.nn.functional.pad(
            (heads.float() / step.clamp_min(1e-30)).round(), (0, self.width - self.head_dim)
        )
        self.data[layer, part, slots] = torch.cat([values.to(torch.int8), step.view(torch.int8)], dim=-1)

    def read(self, layer: int, slots: Tensor, dtype: torch.dtype) -> Tensor:
        """K and V of these slots, [2, m, kv_heads, head_dim]."""
        rows = self.data[layer, :, slots]
        values = rows[..., : self.head_dim].to(dtype)
        if self.dtype != torch.int8:
            return values
        return values * rows[..., self.width :].contiguous().view(torch.float32).to(dtype)


class SplitPool(Pool):
    """K/V cache of a model with layers on several devices: one pool per device, with the same slots."""

    def __init__(self, parts: Sequence[Pool]) -> None:
        self._parts = parts

    @property
    def parts(self) -> Sequence[Pool]:
        return self._parts

    def move(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        for part in self._parts:
            part.move(sources, targets)
