"""Linear layers with one tile shape for every number of rows: a row's result depends on that row alone."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from outrider.backends.triton.dot import dot
from outrider.core.quantized import QuantizedWeight

ROWS, OUTPUTS, INPUTS = 64, 32, 64  # of a tile


@dataclass
class TritonWeight:
    """Weight [O, K] in the dtype of the backend, or int8 with a scale and maybe an offset for each group.

    packed: two weights of 4 bits a byte, [O, K / 2]; the first of them is the lower half.
    """

    values: Tensor
    scales: Tensor | None  # float32 [O, groups]
    offsets: Tensor | None
    bias: Tensor | None
    inputs: int
    outputs: int
    packed: bool = False

    @staticmethod
    def of(
        weight: Tensor | QuantizedWeight, bias: Tensor | None, device: torch.device, dtype: torch.dtype
    ) -> TritonWeight:
        bias = None if bias is None else bias.to(device, dtype)
        if not isinstance(weight, QuantizedWeight):
            outputs, inputs = weight.shape
            values = weight.to(device, dtype).contiguous()
            return TritonWeight(values, None, None, bias, inputs, outputs)
        moved = weight.mapped(lambda part: part.to(device).contiguous())
        outputs, inputs = moved.values.shape
        values, packed = moved.values, weight.bits == 4 and inputs % 2 == 0
        if packed:
            values = values[:, ::2] & 15 | values[:, 1::2] << 4
        return TritonWeight(values, moved.scales, moved.offsets, bias, inputs, outputs, packed)

    def embed(self, ids: Tensor, dtype: torch.dtype) -> Tensor:
        """Rows `ids` [n] of the weight, [n, K]."""
        if self.scales is None:
            return torch.nn.functional.embedding(ids, self.values)
        offsets = None if self.offsets is None else self.offsets[ids]
        values, group = self.values[ids], self.inputs // self.scales.shape[1]
        if self.packed:
            values = torch.stack([values << 4 >> 4, values >> 4], -1).flatten(1)
        return QuantizedWeight(values, self.scales[ids], offsets, 8, group).dense().to(dtype)


@triton.jit
def _weights(
    weight, scales, offsets, at, group, mask, QUANTIZED: tl.constexpr, OFFSET: tl.constexpr,
    PACKED: tl.constexpr,
):  # fmt: skip
    """A tile of the weight, float32 if it is quantized.

    at: number of each weight.  group: index into `scales`.
    """
    values = tl.load(weight + (at // 2 if PACKED else at), mask=mask, other=0.0)
    if PACKED:
        values = values.to(tl.int32)
        values = tl.where(at % 2 == 1, values, values << 4) << 24 >> 28
    if QUANTIZED:
        values = values.to(tl.float32) * tl.load(scales + group, mask=mask, other=0.0)
        if OFFSET:
            values += tl.load(offsets + group, mask=mask, other=0.0)
    return values


@triton.jit(do_not_specialize=["num_rows"])
def _linear(
    x, weight, scales, offsets, bias, y, num_rows, num_outputs, num_inputs, group_size,
    QUANTIZED: tl.constexpr, OFFSET: tl.constexpr, PACKED: tl.constexpr, BIAS: tl.constexpr,
    ADD: tl.constexpr, ROWS: tl.constexpr, OUTPUTS: tl.constexpr, INPUTS: tl.constexpr,
):  # fmt: skip
    """y [n, O] (+)= x [n, K] · weight^T, summed over the inputs in order, INPUTS at a time."""
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    output = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    in_rows, in_outputs = row < num_rows, output < num_outputs
    x_row, w_row = row.to(tl.int64) * num_inputs, output.to(tl.int64) * num_inputs
    groups = num_inputs // group_size
    total = tl.zeros((ROWS, OUTPUTS), tl.float32)
    for first in range(0, num_inputs, INPUTS):
        k = first + tl.arange(0, INPUTS)
        in_inputs = k < num_inputs
        a = tl.load(x + x_row[:, None] + k[None, :], mask=in_rows[:, None] & in_inputs[None, :], other=0.0)
        group = output.to(tl.int64)[None, :] * groups + (k // group_size)[:, None]
        mask = in_outputs[None, :] & in_inputs[:, None]
        at = w_row[None, :] + k[:, None]
        b = _weights(weight, scales, offsets, at, group, mask, QUANTIZED, OFFSET, PACKED)
        total += dot(a, b)
    if BIAS:
        total += tl.load(bias + output, mask=in_outputs, other=0.0).to(tl.float32)[None, :]
    to = y + row.to(tl.int64)[:, None] * num_outputs + output[None, :]
    mask = in_rows[:, None] & in_outputs[None, :]
    if ADD:
        total += tl.load(to, mask=mask, other=0.0).to(tl.float32)
    tl.store(to, total.to(y.dtype.element_ty), mask=mask)


def linear(x: Tensor, weight: TritonWeight, add: Tensor | None = None) -> Tensor:
    """`Backend.linear`; accumulates into `add` in place."""
    x, n = x.contiguous(), x.shape[0]
    y = x.new_empty(n, weight.outputs) if add is None else add
    grid = triton.cdiv(weight.outputs, OUTPUTS), triton.cdiv(n, ROWS)
    values, scales, k = weight.values, weight.scales, weight.inputs
    _linear[grid](
        x, values, values if scales is None else scales,
        values if weight.offsets is None else weight.offsets, values if weight.bias is None else weight.bias,
        y, n, weight.outputs, k, k if scales is None else k // scales.shape[1],
        QUANTIZED=scales is not None, OFFSET=weight.offsets is not None, PACKED=weight.packed,
        BIAS=weight.bias is not None, ADD=add is not None, ROWS=ROWS, OUTPUTS=OUTPUTS, INPUTS=INPUTS,
    )  # fmt: skip
    return y
