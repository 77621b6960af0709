"""A linear's weight in few bits, in the one form that every format is unpacked into and every set of kernels packs from."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Quantised:
    """w[o, k] = scales[o, k // group] * values[o, k] + offsets[o, k // group].

    values int8 [O, K], one a byte whatever `bits` says: -128 … 127 (8 bits) or -8 … 7 (4 bits); scales and offsets float32
    [O, K // group], offsets None where they are all 0; `group` divides K.  Only one layer at a time stands in this form.
    """

    values: Tensor
    scales: Tensor
    offsets: Tensor | None
    bits: int
    group: int

    def __post_init__(self) -> None:
        outputs, inputs = self.values.shape
        assert self.bits in (4, 8) and self.values.dtype == torch.int8 and inputs % self.group == 0
        assert self.scales.shape == (outputs, inputs // self.group)
        assert self.offsets is None or self.offsets.shape == self.scales.shape

    def dense(self) -> Tensor:
        """float32 [O, K]: what the numbers mean."""
        scales = self.scales.repeat_interleave(self.group, dim=1)
        whole = self.values.float() * scales
        return whole if self.offsets is None else whole + self.offsets.repeat_interleave(self.group, dim=1)
