"""Linear layers: a row's result depends on that row alone, bit for bit, in tiles of any shape."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from outrider.backends.triton.dot import INTERPRETED, dot
from outrider.backends.triton.stages import launch
from outrider.core.quantized import QuantizedWeight


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

    @property
    def group(self) -> int:
        """Inputs that share a scale."""
        return self.inputs if self.scales is None else self.inputs // self.scales.shape[1]

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
        # levels may be larger than 4 bits hold
        values, packed = moved.values, weight.bits == 4 and not weight.levels and inputs % 2 == 0
        if packed:
            values = values[:, ::2] & 15 | values[:, 1::2] << 4
        return TritonWeight(values, moved.scales, moved.offsets, bias, inputs, outputs, packed)

    def embed(self, ids: Tensor, dtype: torch.dtype) -> Tensor:
        """Rows `ids` [n] of the weight, [n, K]."""
        values = self.values.index_select(0, ids)
        if self.scales is None:
            return values
        offsets = None if self.offsets is None else self.offsets.index_select(0, ids)
        if self.packed:
            values = torch.stack([values << 4 >> 4, values >> 4], -1).flatten(1)
        scales = self.scales.index_select(0, ids)
        return QuantizedWeight(values, scales, offsets, 8, self.group).dense().to(dtype)


@triton.jit
def _weights(
    weight, scales, offsets, at, group, mask, in_group, QUANTIZED: tl.constexpr, OFFSET: tl.constexpr,
    PACKED: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """A tile of the weight, float32 if it is quantized.

    at: number of each weight.  group: index into `scales`, of each weight or of each output.
    EVEN: the mask is true everywhere.
    """
    if EVEN:
        values = tl.load(weight + (at // 2 if PACKED else at))
    else:
        values = tl.load(weight + (at // 2 if PACKED else at), mask=mask, other=0.0)
    if PACKED:
        values = values.to(tl.int32)
        values = tl.where(at % 2 == 1, values, values << 4) << 24 >> 28
    if QUANTIZED:
        values = values.to(tl.float32) * tl.load(scales + group, mask=in_group, other=0.0)
        if OFFSET:
            values += tl.load(offsets + group, mask=in_group, other=0.0)
    return values


@triton.jit
def tile_sums(
    x, weight, scales, offsets, x_row, in_rows, output, in_outputs, num_inputs, group_size,
    QUANTIZED: tl.constexpr, OFFSET: tl.constexpr, PACKED: tl.constexpr, EVEN: tl.constexpr,
    ONE_GROUP: tl.constexpr, ROWS: tl.constexpr, OUTPUTS: tl.constexpr, INPUTS: tl.constexpr,
):  # fmt: skip
    """Products [OUTPUTS, ROWS] of outputs of a weight and rows of x, summed over the inputs in order.

    x_row: where each row begins.  output: number of each row of the weight.
    ONE_GROUP: the inputs of a tile have one scale.
    """
    w_row, groups = output.to(tl.int64) * num_inputs, num_inputs // group_size
    total = tl.zeros((OUTPUTS, ROWS), tl.float32)
    for first in range(0, num_inputs, INPUTS):
        k = first + tl.arange(0, INPUTS)
        in_inputs = (k < num_inputs) | EVEN
        b = tl.load(x + x_row[None, :] + k[:, None], mask=in_rows[None, :] & in_inputs[:, None], other=0.0)
        mask, at = in_outputs[:, None] & in_inputs[None, :], w_row[:, None] + k[None, :]
        if ONE_GROUP:
            group, in_group = output.to(tl.int64)[:, None] * groups + first // group_size, in_outputs[:, None]
        else:
            group, in_group = output.to(tl.int64)[:, None] * groups + (k // group_size)[None, :], mask
        a = _weights(weight, scales, offsets, at, group, mask, in_group, QUANTIZED, OFFSET, PACKED, EVEN)
        total = dot(a.to(x.dtype.element_ty), b, total)
    return total


@triton.jit(do_not_specialize=["num_rows"])
def _linear(
    x, weight, scales, offsets, bias, y, num_rows, num_outputs, num_inputs, group_size,
    QUANTIZED: tl.constexpr, OFFSET: tl.constexpr, PACKED: tl.constexpr, BIAS: tl.constexpr,
    ADD: tl.constexpr, EVEN: tl.constexpr, ONE_GROUP: tl.constexpr, ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr, INPUTS: tl.constexpr,
):  # fmt: skip
    """y [n, O] (+)= x [n, K] · weight^T.

    A tile is computed transposed, [OUTPUTS, ROWS]: matrix instructions take at least 64 outputs well, but
    only 16 rows.  Tiles of the same outputs follow one another, so that a weight is read from memory once.
    """
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    output = tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)
    in_rows, in_outputs = row < num_rows, output < num_outputs
    total = tile_sums(
        x, weight, scales, offsets, row.to(tl.int64) * num_inputs, in_rows, output, in_outputs, num_inputs,
        group_size, QUANTIZED, OFFSET, PACKED, EVEN, ONE_GROUP, ROWS, OUTPUTS, INPUTS,
    )  # fmt: skip
    if BIAS:
        total += tl.load(bias + output, mask=in_outputs, other=0.0).to(tl.float32)[:, None]
    to = y + row.to(tl.int64)[None, :] * num_outputs + output[:, None]
    mask = in_rows[None, :] & in_outputs[:, None]
    if ADD:
        total += tl.load(to, mask=mask, other=0.0).to(tl.float32)
    tl.store(to, total.to(y.dtype.element_ty), mask=mask)


class Tile(NamedTuple):
    """Of one program.  stages: tiles of the inputs that are loaded ahead, if they fit into shared memory."""

    rows: int
    outputs: int
    inputs: int
    warps: int
    stages: int


FEW, SOME = Tile(16, 64, 128, 4, 6), Tile(32, 64, 128, 4, 5)
MANY, MORE = Tile(64, 64, 128, 4, 5), Tile(128, 64, 128, 4, 4)
WIDE, MOST = Tile(128, 128, 64, 8, 4), Tile(256, 128, 64, 8, 3)
CROWDED = MANY._replace(inputs=64, stages=3)  # leaves room for several programs a processor
TILES = FEW, SOME, MANY, CROWDED, MORE, WIDE, MOST
LEAST_INPUTS = 16  # of a tile


def tile_of(rows: int, weight: TritonWeight, processors: int) -> Tile:
    """The fastest of the tiles that were tried on an H200 (docs/log.md), for so many rows.

    A sum is the same bits in all: a matrix instruction adds 16 inputs at a time, in order.  (In the
    interpreter a tile's inputs are summed first.  There all tiles have as many.)
    """
    outputs = weight.outputs
    tile = next((tile for tile in (FEW, SOME, MANY, MORE) if rows <= tile.rows), MOST)
    if tile is MOST and triton.cdiv(rows, tile.rows) * triton.cdiv(outputs, tile.outputs) < processors:
        tile = MORE  # large tiles would leave processors idle
    if tile is MORE and outputs >= WIDE.outputs * processors:
        tile = WIDE  # reads the rows half as often
    if tile is MANY and outputs >= 2 * tile.outputs * processors:
        tile = CROWDED
    return tile


def fit(tile: Tile, weight: TritonWeight) -> Tile:
    """A tile whose inputs share a scale, if the groups are not too small."""
    inputs = 32 if INTERPRETED else tile.inputs
    while weight.scales is not None and weight.group % inputs and inputs > LEAST_INPUTS:
        inputs //= 2
    return tile._replace(inputs=inputs)


@lru_cache
def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def linear(x: Tensor, weight: TritonWeight, add: Tensor | None = None, tile: Tile | None = None) -> Tensor:
    """`Backend.linear`; accumulates into `add` in place.  tile: another than the fastest."""
    x, n = x.contiguous(), x.shape[0]
    y = x.new_empty(n, weight.outputs) if add is None else add
    tile = fit(tile or tile_of(n, weight, _processors(x.device)), weight)
    grid = triton.cdiv(n, tile.rows), triton.cdiv(weight.outputs, tile.outputs)
    arguments = (x, *parts_of(weight), y, n, weight.outputs, weight.inputs, weight.group)
    flags = flags_of(weight, tile) | {"ADD": add is not None}
    kind = x.device, x.dtype, tile, *flags.items()
    launch(_linear[grid], kind, tile.stages, *arguments, **flags, **sizes_of(tile))
    return y


def parts_of(weight: TritonWeight) -> list[Tensor]:
    """Values, scales, offsets and bias for a kernel, which does not read those that are missing."""
    parts = weight.values, weight.scales, weight.offsets, weight.bias
    return [weight.values if part is None else part for part in parts]


def flags_of(weight: TritonWeight, tile: Tile) -> dict[str, bool]:
    """Constants of a kernel for a weight."""
    return {
        "QUANTIZED": weight.scales is not None, "OFFSET": weight.offsets is not None,
        "PACKED": weight.packed, "BIAS": weight.bias is not None,
        "EVEN": weight.inputs % tile.inputs == 0 and weight.outputs % tile.outputs == 0,
        "ONE_GROUP": weight.scales is None or weight.group % tile.inputs == 0,
    }  # fmt: skip


def sizes_of(tile: Tile) -> dict[str, int]:
    """Constants of a kernel for a tile."""
    return {"ROWS": tile.rows, "OUTPUTS": tile.outputs, "INPUTS": tile.inputs, "num_warps": tile.warps}


def same_in_all_tiles(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether a device gives a row the same sums in every tile, and in every place of it.

    Compared in float32: a result that is rounded to `dtype` rarely shows a difference.
    """
    rows, outputs = 2 * MOST.rows, MOST.outputs
    x = torch.linspace(-1, 1, 256 * rows, device=device).sin().view(rows, 256).to(dtype)
    x[1::2] = x[::2].clone()  # every row twice, in places of both parities
    weight = TritonWeight.of(x[:outputs].flip(0, 1), None, device, dtype)
    first, *others = (linear(x, weight, torch.zeros(rows, outputs, device=device), tile) for tile in TILES)
    return torch.equal(first[1::2], first[::2]) and all(torch.equal(first, other) for other in others)
