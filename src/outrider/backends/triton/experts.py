"""A mixture of experts in place of an MLP: every row has a few of many small MLPs.

A row and one of its experts are a pair.  Pairs are sorted by expert, so that a tile of a linear has rows of
one expert, whose weights it reads once:

    route   of a row: its experts by number, and their weights            pairs 0 .. n · chosen, row by row
    count   of an expert: its pairs
    sort    pairs by expert, and tiles of at most `Tile.rows` pairs       order, tiles
    linear  gate_up, SiLU · up (`gate_limit`: clamped), down, of every tile with pairs
    add     of a row: the weighted outputs of its experts, by number

All sizes follow from the number of rows, so the host reads nothing, and a graph can hold all launches.  There
are as many tiles as any choice of experts may need; those without pairs end at once.  A pair is computed from
its row and its expert alone, and a row adds its own pairs in order: its result does not depend on others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from outrider.backends.layer import LayerExperts
from outrider.backends.triton.elementwise import clamped_mul, silu_mul
from outrider.backends.triton.linear import (
    FEW,
    MANY,
    Tile,
    TritonWeight,
    fit,
    flags_of,
    linear,
    parts_of,
    sizes_of,
    tile_sums,
)
from outrider.backends.triton.stages import launch
from outrider.core.quantized import QuantizedWeight

CHUNK = 1024  # pairs that `_count` and `_sort` read at once
WIDTH = 1024  # numbers that a program of `_add_pairs` computes


@triton.jit
def _route(
    logits, experts, weights, CHOSEN: tl.constexpr, COUNT: tl.constexpr, WIDTH: tl.constexpr,
    NORMALIZED: tl.constexpr,
):  # fmt: skip
    """Of a row: the experts of the largest logits, of equal ones the first; and their softmax weights.

    A row with a logit that is no number, as rows that pad a step have, has no experts: its weights are no
    numbers, and so is its sum.
    """
    row, number = tl.program_id(0).to(tl.int64), tl.arange(0, WIDTH)
    real = number < COUNT
    found = tl.load(logits + row * COUNT + number, mask=real, other=float("-inf")).to(tl.float32)
    is_number = tl.sum((found != found).to(tl.int32), 0) == 0
    found = tl.where(is_number, found, 0.0)
    is_open, chosen = real, number < 0
    for _ in range(CHOSEN):
        best = tl.max(tl.where(is_open, found, float("-inf")), 0)
        first = tl.min(tl.where(is_open & (found == best), number, WIDTH), 0)
        chosen, is_open = chosen | (number == first), is_open & (number != first)
    exps = tl.where(real, tl.exp(found - tl.max(tl.where(real, found, float("-inf")), 0)), 0.0)
    counted = tl.where(chosen, exps, 0.0) if NORMALIZED else exps
    share = exps / tl.sum(counted, 0)
    at = row * CHOSEN + tl.cumsum(chosen.to(tl.int32), 0) - 1
    tl.store(experts + at, tl.where(is_number, number, -1), mask=chosen)
    tl.store(weights + at, tl.where(is_number, share, float("nan")), mask=chosen)


@triton.jit(do_not_specialize=["num_pairs"])
def _count(experts, counts, num_pairs, CHUNK: tl.constexpr):
    """Of an expert: how many pairs have it."""
    expert, total = tl.program_id(0), tl.zeros((CHUNK,), tl.int32)
    for first in range(0, num_pairs, CHUNK):
        pair = first + tl.arange(0, CHUNK)
        total += (tl.load(experts + pair, mask=pair < num_pairs, other=-1) == expert).to(tl.int32)
    tl.store(counts + expert, tl.sum(total, 0))


@triton.jit(do_not_specialize=["num_pairs", "num_tiles"])
def _sort(
    experts, counts, order, tiles, num_pairs, num_tiles, COUNT: tl.constexpr, WIDTH: tl.constexpr,
    ROWS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Of an expert: its pairs in `order`, behind those of the experts before it, and its tiles.

    tiles: [num_tiles, 3], expert, first place in `order`, number of pairs.  Those that no expert needs have
    no pairs; each program writes some of them.
    """
    expert, number = tl.program_id(0), tl.arange(0, WIDTH)
    count = tl.load(counts + number, mask=number < COUNT, other=0)
    needed = (count + (ROWS - 1)) // ROWS
    own, place = tl.load(counts + expert), tl.sum(tl.where(number < expert, count, 0), 0)
    first_tile, used = tl.sum(tl.where(number < expert, needed, 0), 0), tl.sum(needed, 0)
    for i in range((own + (ROWS - 1)) // ROWS):
        tile = tiles + (first_tile + i) * 3
        tl.store(tile, expert)
        tl.store(tile + 1, place + i * ROWS)
        tl.store(tile + 2, tl.minimum(own - i * ROWS, ROWS))
    for i in range(used + expert, num_tiles, COUNT):
        tl.store(tiles + i * 3 + 2, 0)
    for first in range(0, num_pairs, CHUNK):
        pair = first + tl.arange(0, CHUNK)
        has = tl.load(experts + pair, mask=pair < num_pairs, other=-1) == expert
        tl.store(order + place + tl.cumsum(has.to(tl.int32), 0) - 1, pair, mask=has)
        place += tl.sum(has.to(tl.int32), 0)


@triton.jit
def _linear_of_experts(
    x, weight, scales, offsets, bias, y, order, tiles, num_outputs, num_inputs, group_size,
    CHOSEN: tl.constexpr, FROM_ROWS: tl.constexpr, QUANTIZED: tl.constexpr, OFFSET: tl.constexpr,
    PACKED: tl.constexpr, BIAS: tl.constexpr, EVEN: tl.constexpr, ONE_GROUP: tl.constexpr,
    ROWS: tl.constexpr, OUTPUTS: tl.constexpr, INPUTS: tl.constexpr,
):  # fmt: skip
    """A tile of the linear of an expert; weight [experts · O, K].

    FROM_ROWS: x are the rows, y the pairs as in `order`.  Otherwise x are those, and y the pairs row by row.
    """
    tile = tiles + tl.program_id(0) * 3
    count = tl.load(tile + 2)
    if count <= 0:
        return
    lane, output = tl.arange(0, ROWS), tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)
    in_rows, in_outputs, place = lane < count, output < num_outputs, tl.load(tile + 1) + lane
    pair = tl.load(order + place, mask=in_rows, other=0)
    if FROM_ROWS:
        source, to = pair // CHOSEN, place
    else:
        source, to = place, pair
    in_weight = tl.load(tile).to(tl.int64) * num_outputs + output
    total = tile_sums(
        x, weight, scales, offsets, source.to(tl.int64) * num_inputs, in_rows, in_weight, in_outputs,
        num_inputs, group_size, QUANTIZED, OFFSET, PACKED, EVEN, ONE_GROUP, ROWS, OUTPUTS, INPUTS,
    )  # fmt: skip
    if BIAS:
        total += tl.load(bias + in_weight, mask=in_outputs, other=0.0).to(tl.float32)[:, None]
    to_y = y + to.to(tl.int64)[None, :] * num_outputs + output[:, None]
    tl.store(to_y, total.to(y.dtype.element_ty), mask=in_rows[None, :] & in_outputs[:, None])


@triton.jit
def _add_pairs(x, pairs, weights, hidden, CHOSEN: tl.constexpr, WIDTH: tl.constexpr):
    """x of a row plus its weighted pairs, in one sum."""
    row, i = tl.program_id(0).to(tl.int64), tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    mask, total = i < hidden, tl.zeros((WIDTH,), tl.float32)
    for pair in range(CHOSEN):
        at = row * CHOSEN + pair
        y = tl.load(pairs + at * hidden + i, mask=mask, other=0.0).to(tl.float32)
        total += y * tl.load(weights + at)
    total += tl.load(x + row * hidden + i, mask=mask, other=0.0).to(tl.float32)
    tl.store(x + row * hidden + i, total.to(x.dtype.element_ty), mask=mask)


def pack(experts: LayerExperts, dtype: torch.dtype) -> LayerExperts:
    """Experts of packed weights, with those of all in one: `gate_up` and `down` are `TritonWeight`s."""
    gate_up, down = _joined(experts.gate_up, dtype), _joined(experts.down, dtype)
    return replace(experts, gate_up=gate_up, down=down)


def _joined(weights: Sequence[TritonWeight], dtype: torch.dtype) -> TritonWeight:
    """Weights of one shape, rows of one after those of another; `outputs` are those of each.

    Weights that are quantized in several ways are widened.
    """
    if len({(w.packed, w.group, w.scales is None, w.offsets is None) for w in weights}) > 1:
        weights = [_widened(weight, dtype) for weight in weights]
    biases = [weight.bias for weight in weights if weight.bias is not None]
    assert len(biases) in (0, len(weights)), "all experts have the same tensors"
    first = weights[0]
    return TritonWeight(
        torch.cat([weight.values for weight in weights]),
        _cat([weight.scales for weight in weights]),
        _cat([weight.offsets for weight in weights]),
        torch.cat(biases) if biases else None,
        first.inputs,
        first.outputs,
        first.packed,
    )


def _cat(parts: Sequence[Tensor | None]) -> Tensor | None:
    """All parts, or None if there are none."""
    found = [part for part in parts if part is not None]
    return torch.cat(found) if found else None


def _widened(weight: TritonWeight, dtype: torch.dtype) -> TritonWeight:
    rows = torch.arange(weight.outputs, device=weight.values.device)
    return TritonWeight(weight.embed(rows, dtype), None, None, weight.bias, weight.inputs, weight.outputs)


def add_mixture(x: Tensor, u: Tensor, experts: LayerExperts) -> Tensor:
    """x [n, h] plus the weighted sum of every row's experts of u [n, h], in place."""
    (n, hidden), chosen, count = u.shape, experts.chosen, experts.router.outputs
    assert x.is_contiguous()
    u, logits = u.contiguous(), linear(u, experts.router)
    numbers = torch.empty(n, chosen, dtype=torch.int32, device=u.device)
    weights = torch.empty(n, chosen, dtype=torch.float32, device=u.device)
    _route[(n,)](
        logits, numbers, weights, CHOSEN=chosen, COUNT=count, WIDTH=triton.next_power_of_2(count),
        NORMALIZED=experts.normalized,
    )  # fmt: skip
    tile = FEW if n * chosen <= FEW.rows * count else MANY
    by_expert = _sorted(numbers, count, tile)
    gate_up = u.new_empty(n * chosen, experts.gate_up.outputs)
    _multiply(u, experts.gate_up, gate_up, by_expert, chosen, True)
    pairs = u.new_empty(n * chosen, hidden)
    limit = experts.gate_limit
    inner = clamped_mul(gate_up, experts.gate_slope, limit) if limit else silu_mul(gate_up)
    _multiply(inner, experts.down, pairs, by_expert, chosen, False)
    _add_pairs[(n, triton.cdiv(hidden, WIDTH))](x, pairs, weights, hidden, CHOSEN=chosen, WIDTH=WIDTH)
    return x


class _Sorted(NamedTuple):
    """As `_sort` has them, for tiles of a shape."""

    order: Tensor
    tiles: Tensor
    tile: Tile


def _sorted(numbers: Tensor, count: int, tile: Tile) -> _Sorted:
    """The pairs by expert; numbers: int32, the expert of each, or -1."""
    pairs = numbers.numel()
    most = (pairs + min(pairs, count) * (tile.rows - 1)) // tile.rows
    counts, order = numbers.new_empty(count), numbers.new_empty(pairs)
    tiles = numbers.new_empty(most, 3)
    _count[(count,)](numbers, counts, pairs, CHUNK=CHUNK)
    _sort[(count,)](
        numbers, counts, order, tiles, pairs, most, COUNT=count, WIDTH=triton.next_power_of_2(count),
        ROWS=tile.rows, CHUNK=CHUNK,
    )  # fmt: skip
    return _Sorted(order, tiles, tile)


def _multiply(
    x: Tensor, weight: TritonWeight, y: Tensor, by_expert: _Sorted, chosen: int, from_rows: bool
) -> None:
    """A linear of all pairs; `weight` as `_joined`, the rest as in `_linear_of_experts`."""
    order, tiles, tile = by_expert
    tile = fit(tile, weight)
    grid = len(tiles), triton.cdiv(weight.outputs, tile.outputs)
    arguments = (x, *parts_of(weight), y, order, tiles, weight.outputs, weight.inputs, weight.group)
    flags = flags_of(weight, tile) | {"CHOSEN": chosen, "FROM_ROWS": from_rows}
    kind = "experts", x.device, x.dtype, tile, *flags.items()
    launch(_linear_of_experts[grid], kind, tile.stages, *arguments, **flags, **sizes_of(tile))


@lru_cache
def same_as_linear(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether a device gives the rows of an expert the sums of `linear`, in tiles of every shape.

    Weights are dense, or of 4 bits.  Compared in float32: a result that is rounded to `dtype` rarely shows a
    difference.
    """
    rows, outputs, inputs, count = MANY.rows + FEW.rows, MANY.outputs, 256, 3
    x = torch.linspace(-1, 1, rows * inputs, device=device).sin().view(rows, inputs).to(dtype)
    dense = torch.linspace(0, 1e4, count * outputs * inputs, device=device).cos().view(count, outputs, inputs)
    scales = torch.linspace(0.1, 0.2, outputs * inputs // 32, device=device).view(outputs, inputs // 32)
    few = [QuantizedWeight((7.9 * each).floor().to(torch.int8), scales, None, 4, 32) for each in dense]
    numbers = torch.arange(rows, dtype=torch.int32, device=device) % 5 % count
    chosen = numbers.long(), torch.arange(rows, device=device)
    for kind in (dense, few):
        weights = [TritonWeight.of(each, None, device, dtype) for each in kind]
        alone = [linear(x, weight, torch.zeros(rows, outputs, device=device)) for weight in weights]
        expected = torch.stack(alone)[chosen]
        for tile in (FEW, MANY):
            by_expert, y = _sorted(numbers, count, tile), torch.empty(rows, outputs, device=device)
            _multiply(x[by_expert.order.long()], _joined(weights, dtype), y, by_expert, 1, False)
            if not torch.equal(y, expected):
                return False
    return True
