"""Weights of linear layers in the layouts of linear.c and linear_int.c."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from outrider.backends.cpu.bindings import STRUCTS
from outrider.core.huge_pages import WEIGHTS
from outrider.core.quantized import QuantizedWeight

PANEL, WIDE = 64, 32  # outputs side by side in a packed weight, as in linear.c and linear_int.c
# FLOAT32, BFLOAT16 and INT8 of kernels.h; INT4 is for weights only
KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.int8: 2}


@dataclass
class Packed:
    """A weight [O, K] as panels of 64 outputs.

    float32:  [O/64][K][64]
    bfloat16: [O/64][K/2][64][2]
    integers: see linear_int.c
    levels:   int8 [16], see `QuantizedWeight`
    """

    data: Tensor
    bias: Tensor | None
    inputs: int
    outputs: int
    kind: int
    group: int = 0
    offsets: bool = False
    unit: float = 1.0
    rounds_inputs: bool = False
    levels: Tensor | None = None

    def __post_init__(self) -> None:
        self.data = WEIGHTS.copy(self.data)
        bias = None if self.bias is None else self.bias.data_ptr()
        levels = None if self.levels is None else self.levels.data_ptr()
        form = self.kind, self.group, self.offsets, self.unit, self.rounds_inputs, levels
        self.c = STRUCTS["Weight"](self.data.data_ptr(), bias, *form)


def pack(
    weight: Tensor | QuantizedWeight,
    bias: Tensor | None,
    dtype: torch.dtype,
    inputs_dtype: torch.dtype = torch.float32,
) -> Packed:
    """Pack [O, K] as floats of `dtype`; a quantized weight keeps its bits.

    inputs_dtype: what the inputs of a bfloat16 weight are rounded to.
    """
    bias = None if bias is None else bias.float().contiguous()
    if isinstance(weight, QuantizedWeight):
        if weight.group % 16 == 0:
            return _integers(_supported(weight.regrouped(32 if weight.group % 32 == 0 else 16)), bias)
        weight = weight.dense()  # groups that the vector kernels do not support
    outputs, inputs = weight.shape
    half = dtype == torch.bfloat16
    wide, deep = -(-outputs // PANEL) * PANEL, inputs + inputs % 2 if half else inputs
    if (wide, deep) != (outputs, inputs):
        weight = torch.nn.functional.pad(weight, (0, deep - inputs, 0, wide - outputs))
    weight = weight.to(dtype)
    if half:
        data = weight.view(wide // PANEL, PANEL, deep // 2, 2).permute(0, 2, 1, 3).contiguous()
    else:
        data = weight.view(wide // PANEL, PANEL, deep).permute(0, 2, 1).contiguous()
    rounds = half and inputs_dtype == torch.bfloat16
    return Packed(data, bias, inputs, outputs, KINDS[dtype], rounds_inputs=rounds)


def _supported(weight: QuantizedWeight) -> QuantizedWeight:
    """The same weight; in 8 bits if it has levels that the kernels do not support."""
    if not weight.levels or (weight.group == 32 and weight.offsets is None):
        return weight
    return replace(weight, bits=8, levels=())


def _coded(values: Tensor, levels: Sequence[int]) -> tuple[Tensor, Tensor]:
    """The place of every value among the levels, minus 8, and the levels, int8 [16]."""
    padded = np.zeros(16, dtype=np.int8)
    padded[: len(levels)] = levels
    place_of = np.full(256, -8, dtype=np.int8)  # by the bits of a value; those that are no level are padding
    place_of[padded[: len(levels)].view(np.uint8)] = np.arange(len(levels)) - 8
    return torch.from_numpy(np.take(place_of, values.numpy().view(np.uint8))), torch.from_numpy(padded)


def _integers(weight: QuantizedWeight, bias: Tensor | None) -> Packed:
    """Pack in the layout of linear_int.c.

    `unit`, a power of two, scales the scales into the range of half precision.
    """
    (outputs, inputs), group = weight.values.shape, weight.group
    groups, lines = inputs // group, -(-outputs // WIDE)
    pad = (0, 0, 0, lines * WIDE - outputs)
    values, levels = torch.nn.functional.pad(weight.values, pad), None
    if weight.levels:
        values, levels = _coded(values, weight.levels)
    if weight.bits == 8:
        unsigned = (values.view(torch.uint8) ^ 128).view(lines, WIDE, groups, group // 4, 4)
        data = unsigned.permute(0, 2, 3, 1, 4).reshape(lines, groups, -1)
    else:
        halves = (values + 8).view(torch.uint8).view(lines, WIDE, groups, group // 16, 2, 2, 4)
        pairs = halves[:, :, :, :, 0] | halves[:, :, :, :, 1] << 4
        data = pairs.permute(0, 2, 3, 4, 1, 5).reshape(lines, groups, -1)
    rows = [part for part in (weight.scales, weight.offsets) if part is not None]
    most = max(float(part.abs().max()) for part in rows)
    # the largest is just below 2**15
    unit = 2.0 ** (math.frexp(most)[1] - 15) if most > 0 and math.isfinite(most) else 1.0
    for part in rows:
        small = torch.nn.functional.pad(part / unit, pad).half().view(lines, WIDE, groups)
        data = torch.cat([data, small.transpose(1, 2).contiguous().view(torch.uint8)], dim=-1)
    kind = 2 if weight.bits == 8 else 3
    has_offsets = weight.offsets is not None
    return Packed(data, bias, inputs, outputs, kind, group, has_offsets, unit, levels=levels)
