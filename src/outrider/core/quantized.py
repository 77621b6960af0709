"""Quantized weight: the common form between checkpoint formats and backend packing."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor


@dataclass(frozen=True)
class QuantizedWeight:
    """Weight of a linear in 8 or 4 bits.

    w[o, k] = scales[o, k // group] * values[o, k] + offsets[o, k // group]

    values:  int8 [O, K], one a byte: -128 … 127 (8 bits), or -8 … 7 or `levels` (4 bits)
    scales:  float32 [O, K // group]; `group` divides K
    offsets: float32 [O, K // group], None if all are 0
    levels:  the values that occur, at most 16 in ascending order; empty: -8 … 7, or 8 bits

    Only one layer at a time is held in this form.
    """

    values: Tensor
    scales: Tensor
    offsets: Tensor | None
    bits: int
    group: int
    levels: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        outputs, inputs = self.values.shape
        assert self.bits in (4, 8) and self.values.dtype == torch.int8 and inputs % self.group == 0
        assert not self.levels or (self.bits == 4 and len(self.levels) <= 16)
        assert self.scales.shape == (outputs, inputs // self.group)
        assert self.offsets is None or self.offsets.shape == self.scales.shape

    def dense(self) -> Tensor:
        """The weight as float32 [O, K]."""
        scales = self.scales.repeat_interleave(self.group, dim=1)
        dense = self.values.float() * scales
        return dense if self.offsets is None else dense + self.offsets.repeat_interleave(self.group, dim=1)

    def mapped(self, change: Callable[[Tensor], Tensor]) -> QuantizedWeight:
        """A copy with `change` applied to every tensor, to move it or to select outputs."""
        offsets = None if self.offsets is None else change(self.offsets)
        return replace(self, values=change(self.values), scales=change(self.scales), offsets=offsets)

    def regrouped(self, size: int) -> QuantizedWeight:
        """The same weight in groups of `size`, which divides `group`."""
        assert self.group % size == 0
        repeats = self.group // size
        scales = self.scales.repeat_interleave(repeats, dim=1)
        offsets = None if self.offsets is None else self.offsets.repeat_interleave(repeats, dim=1)
        return replace(self, scales=scales, offsets=offsets, group=size)


def join(parts: Sequence[Tensor | QuantizedWeight], dtype: torch.dtype) -> Tensor | QuantizedWeight:
    """Concatenate weights of the same input along their outputs.

    Quantized weights take the largest bits and the common group of all, and 8 bits where their levels differ,
    which is exact.  If any weight is not quantized, the result is a dense tensor of `dtype`.
    """
    quantized = [part for part in parts if isinstance(part, QuantizedWeight)]
    if len(quantized) < len(parts):
        return torch.cat([_dense(part).to(dtype) for part in parts])
    if len(parts) == 1:
        return quantized[0]
    group = math.gcd(*(part.group for part in quantized))
    quantized = [part.regrouped(group) for part in quantized]
    values = torch.cat([part.values for part in quantized])
    scales = torch.cat([part.scales for part in quantized])
    offsets = None
    if any(part.offsets is not None for part in quantized):
        offsets = torch.cat([_offsets(part) for part in quantized])
    levels = {part.levels for part in quantized}
    if len(levels) > 1:
        return QuantizedWeight(values, scales, offsets, 8, group)
    return QuantizedWeight(values, scales, offsets, max(part.bits for part in quantized), group, levels.pop())


def _dense(part: Tensor | QuantizedWeight) -> Tensor:
    return part.dense() if isinstance(part, QuantizedWeight) else part


def _offsets(part: QuantizedWeight) -> Tensor:
    return torch.zeros_like(part.scales) if part.offsets is None else part.offsets
