"""Attention of ragged rows, chains and trees, over paged K/V, in two passes.

The keys of a row are counted 0, 1, 2, … in the order of their positions (`core/step_input.py`).  Products
are taken per BLOCK keys, at multiples of BLOCK.  The first pass sums each SPLIT keys on its own, block by
block, the second adds the splits of a row in order.  So what is computed for a row depends on its own keys
alone: not on the other rows, on their number, or on whether a key is in the slot table or in the path of a
tree node.

        keys      0        BLOCK     2 BLOCK     3 BLOCK            SPLIT = 3 BLOCK
        table     ■ ■ ■ ■ ■ ■ ■ ■ ■ ■ ■ │ ■ ■
        node 0                          │     ■                     keys of the same number:
        node 2                          │     ■ ■                   each row has its own slot there
                           for all rows │ for each row

Blocks whose keys all rows of a piece (`plan.py`) have in the table are computed for the whole piece, for the
query heads of one K/V head.  The others, at the end, are computed for each row by itself, which has slots of
its own there.  Where a split has blocks of both kinds, its sums are stored in between.  Both take the same
products of the same blocks.  The compiler may fuse multiplications and additions in one of the two and not in
the other, so the kernels are launched without that.
"""

from __future__ import annotations

from array import array
from functools import lru_cache
from itertools import pairwise
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from outrider.backends.base import LayerKV, ScoreModifier, Scores
from outrider.backends.launch import AttentionShape
from outrider.backends.triton.dot import dot, rounded
from outrider.backends.triton.elementwise import Planes, capped
from outrider.backends.triton.plan import PIECE, Plan, plan_of
from outrider.backends.triton.stages import launch
from outrider.backends.triton.visible import first_key, seen_by
from outrider.cache.pool import Pool
from outrider.core.step_input import StepInput

BLOCK, SPLIT = 64, 256  # keys
TILE = 64  # query heads of all rows that a program computes, unless one row has more
LEAST_ROWS = 16  # of a matrix instruction
STAGES = 2  # blocks that are loaded ahead; with three, fewer programs fit on a processor
TOGETHER = 16  # splits that the second pass adds at once
PARTIAL_BYTES = 1 << 26  # of sums between the passes; more rows are computed one part after another


@triton.jit
def _slots(plan, row, j, most, max_path, OWN: tl.constexpr):
    """The slots of the keys j below `most`; of a row with a path, if OWN."""
    slots = plan.table_slots + tl.load(plan.tables + row) + j
    if not OWN:
        return tl.load(slots, mask=j < most, other=0)
    context = tl.load(plan.contexts + row)
    in_table = tl.load(slots, mask=(j < most) & (j < context), other=0)
    path = plan.path_slots + row * max_path - context
    return tl.load(path + j, mask=(j < most) & (j >= context), other=in_table)


@triton.jit
def _add_block(
    state, q, kv, kv_head, slots, exists, seen, ahead, scale, cap, slope, D: tl.constexpr,
    WIDTH: tl.constexpr, CAP: tl.constexpr, SLOPES: tl.constexpr, INT8: tl.constexpr,
):  # fmt: skip
    """`state` of each row after BLOCK more keys: highest score, mass of the weights, weights times V."""
    best, mass, total = state
    d = tl.arange(0, WIDTH)
    at = kv_head.to(tl.int64) * kv.head_stride + slots.to(tl.int64) * kv.slot_stride
    scale_at = (at + (D + 31) // 32 * 32) // 4
    k = tl.load(kv.k + at[None, :] + d[:, None], mask=exists[None, :] & (d < D)[:, None], other=0.0)
    scores = dot(q, rounded(k, q), tl.zeros((q.shape[0], k.shape[1]), tl.float32)) * scale
    if INT8:
        scores *= tl.load(kv.k_scales + scale_at, mask=exists, other=0.0)[None, :]
    if CAP:
        scores = capped(scores, cap)
    if SLOPES:
        scores += slope[:, None] * ahead
    scores = tl.where(seen, scores, float("-inf"))
    highest = tl.maximum(best, tl.max(scores, 1))
    finite = tl.where(highest == float("-inf"), 0.0, highest)
    weights, shrunk = tl.exp(scores - finite[:, None]), tl.exp(best - finite)
    mass = mass * shrunk + tl.sum(weights, 1)
    if INT8:
        weights *= tl.load(kv.v_scales + scale_at, mask=exists, other=0.0)[None, :]
    v = tl.load(kv.v + at[:, None] + d[None, :], mask=exists[:, None] & (d < D)[None, :], other=0.0)
    return highest, mass, dot(weights.to(q.dtype), rounded(v, q), total * shrunk[:, None])


@triton.jit
def _so_far(sums, ends, at, stored, M: tl.constexpr, WIDTH: tl.constexpr, OWN: tl.constexpr):
    """`state` of each row before a block: of no keys, or as it is stored."""
    if OWN:
        best = tl.load(ends + at * 2, mask=stored, other=float("-inf"))
        mass = tl.load(ends + at * 2 + 1, mask=stored, other=0.0)
        d = tl.arange(0, WIDTH)
        total = tl.load(sums + at[:, None] * WIDTH + d[None, :], mask=stored[:, None], other=0.0)
    else:
        best, mass = tl.full((M,), float("-inf"), tl.float32), tl.zeros((M,), tl.float32)
        total = tl.zeros((M, WIDTH), tl.float32)
    return best, mass, total


CHANGING = ["first_piece", "first_row", "num_splits", "pinned", "max_path"]  # with the step


@triton.jit
def _place(
    plan, first_piece, first_row, num_splits, PIECES: tl.constexpr, ROWS: tl.constexpr, OWN: tl.constexpr,
    BLOCK: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """Of a program: its first row, how many, 0 if there is nothing to compute, its split, and the number of
    keys that are computed for all rows of its piece.
    """
    split = tl.program_id(2)
    if OWN:
        first = first_row + tl.program_id(0)
        common = tl.load(plan.shared + first) // BLOCK * BLOCK
        split += common // SPLIT
        count = (split < num_splits).to(tl.int32)
    else:
        piece = plan.pieces + (first_piece + tl.program_id(0) // PIECES) * 3
        skipped = tl.program_id(0) % PIECES * ROWS
        first, count = tl.load(piece) + skipped, tl.minimum(tl.load(piece + 1) - skipped, ROWS)
        common = tl.load(piece + 2) // BLOCK * BLOCK
    return first, count, split, common


@triton.jit(do_not_specialize=CHANGING)
def _sum_split(
    q, kv, plan, slopes, sums, ends, first_piece, first_row, num_splits, scale, cap, pinned, max_path,
    HEADS: tl.constexpr, GROUP: tl.constexpr, LANES: tl.constexpr, ROWS: tl.constexpr, PIECES: tl.constexpr,
    D: tl.constexpr, WIDTH: tl.constexpr, WINDOW: tl.constexpr, CAP: tl.constexpr, SLOPES: tl.constexpr,
    INT8: tl.constexpr, OWN: tl.constexpr, BLOCK: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """First pass: sums [N, H, splits, WIDTH] of weights times V; their highest score and mass in `ends`.

    OWN: for one row, the blocks that its piece does not share, after those that it shares.
    """
    first, count, split, common = _place(
        plan, first_piece, first_row, num_splits, PIECES, ROWS, OWN, BLOCK, SPLIT
    )
    if count <= 0:
        return
    kv_head = tl.program_id(1)
    lane = tl.arange(0, ROWS * LANES)
    in_tile, head, row = lane // LANES, kv_head * GROUP + lane % LANES, first + lane // LANES
    real = (in_tile < count) & (lane % LANES < GROUP)
    num_keys = tl.load(plan.num_keys + row, mask=real, other=0)
    position = tl.load(plan.positions + row, mask=real, other=0)
    shift = tl.load(plan.shifts + row, mask=real, other=0)
    oldest = tl.where(real, first_key(position, shift, pinned, WINDOW), 2147483647)
    begin, most = tl.maximum(split * SPLIT, tl.min(oldest) // BLOCK * BLOCK), tl.max(num_keys)
    end = tl.minimum(split * SPLIT + SPLIT, most)
    start = tl.maximum(begin, common) if OWN else begin
    end = end if OWN else tl.minimum(end, common)
    if start >= end:
        return
    d = tl.arange(0, WIDTH)
    at_q = (row.to(tl.int64) * HEADS + head)[:, None] * D + d[None, :]
    heads = tl.load(q + at_q, mask=real[:, None] & (d < D)[None, :], other=0.0)
    slope = tl.load(slopes + head, mask=real, other=0.0) if SLOPES else num_keys * 0.0
    at = ((row - first_row).to(tl.int64) * HEADS + head) * num_splits + split
    stored = real & (lane * 0 + begin < common)  # by the program of the piece
    best, mass, total = _so_far(sums, ends, at, stored, ROWS * LANES, WIDTH, OWN)
    for block in range(start, end, BLOCK):
        j = block + tl.arange(0, BLOCK)
        seen, ahead = seen_by(j, num_keys, position, shift, pinned, WINDOW)
        slots = _slots(plan, first, j, most, max_path, OWN)
        best, mass, total = _add_block(
            (best, mass, total), heads, kv, kv_head, slots, j < most, seen, ahead, scale, cap, slope, D,
            WIDTH, CAP, SLOPES, INT8,
        )  # fmt: skip
    tl.store(sums + at[:, None] * WIDTH + d[None, :], total, mask=real[:, None])
    tl.store(ends + at * 2, best, mask=real)
    tl.store(ends + at * 2 + 1, mass, mask=real)


@triton.jit(do_not_specialize=CHANGING)
def _add_splits(
    sums, ends, out, plan, sinks, first_row, num_splits, pinned, HEADS: tl.constexpr, D: tl.constexpr,
    WIDTH: tl.constexpr, WINDOW: tl.constexpr, SINKS: tl.constexpr, SPLIT: tl.constexpr,
    TOGETHER: tl.constexpr,
):  # fmt: skip
    """Second pass, for one head of one row: TOGETHER splits at once, at multiples of TOGETHER."""
    row, head, d = first_row + tl.program_id(0), tl.program_id(1), tl.arange(0, WIDTH)
    position, shift = tl.load(plan.positions + row), tl.load(plan.shifts + row)
    first = first_key(position, shift, pinned, WINDOW) // SPLIT
    end = tl.cdiv(tl.load(plan.num_keys + row), SPLIT)
    begin = first // TOGETHER * TOGETHER
    at = (tl.program_id(0).to(tl.int64) * HEADS + head) * num_splits
    best, mass, total = float("-inf"), 0.0, tl.zeros((WIDTH,), tl.float32)
    if SINKS:
        best = tl.load(sinks + head)
    for start in range(begin, end, TOGETHER):
        split = start + tl.arange(0, TOGETHER)
        mask = (split >= first) & (split < end)
        found = tl.load(ends + (at + split) * 2, mask=mask, other=float("-inf"))
        best = tl.maximum(best, tl.max(found, 0))
    finite = tl.where(best == float("-inf"), 0.0, best)
    if SINKS:
        mass = tl.exp(tl.load(sinks + head) - finite)
    for start in range(begin, end, TOGETHER):
        split = start + tl.arange(0, TOGETHER)
        mask = (split >= first) & (split < end)
        found = tl.load(ends + (at + split) * 2, mask=mask, other=float("-inf"))
        share = tl.exp(found - finite)
        mass += tl.sum(tl.load(ends + (at + split) * 2 + 1, mask=mask, other=0.0) * share, 0)
        part = tl.load(sums + (at + split)[:, None] * WIDTH + d[None, :], mask=mask[:, None], other=0.0)
        total += tl.sum(part * share[:, None], 0)
    to = out + (row.to(tl.int64) * HEADS + head) * D + d
    tl.store(to, (total / mass).to(out.dtype.element_ty), mask=d < D)


class _Part(NamedTuple):
    """Pieces that are computed together, and their rows."""

    first_piece: int
    pieces: int
    first_row: int
    rows: int


def _parts(query_start: list[int], row_bytes: int) -> list[_Part]:
    """The pieces of a step, cut where the sums of their rows would exceed PARTIAL_BYTES."""
    most, parts = max(PIECE, PARTIAL_BYTES // row_bytes), [_Part(0, 0, 0, 0)]
    for first, end in pairwise(query_start):
        for at in range(first, end, PIECE):
            rows, last = min(PIECE, end - at), parts[-1]
            if last.rows + rows > most:
                last = _Part(last.first_piece + last.pieces, 0, at, 0)
                parts.append(last)
            parts[-1] = last._replace(pieces=last.pieces + 1, rows=last.rows + rows)
    return parts


def in_one_part(spec: AttentionShape, rows: int, keys: int) -> bool:
    """Whether the sums of so many rows of any requests are computed together."""
    return rows * _row_bytes(spec, keys) <= PARTIAL_BYTES


def _row_bytes(spec: AttentionShape, keys: int) -> int:
    return spec.heads * _splits(keys) * _width(spec.head_dim) * 4


def attend(q: Tensor, spec: AttentionShape, plan: Plan, kv: LayerKV, scores: Scores) -> Tensor:
    """`Backend.attend` of q [N, H, D]; [N, H·D]."""
    step, heads, d = kv.step_input, spec.heads, spec.head_dim
    q = q.reshape(len(q), heads, d).contiguous()
    parts, splits = _parts(step.query_start, _row_bytes(spec, step.max_seq_len)), _splits(step.max_seq_len)
    partial = _partial(q, spec, max(part.rows for part in parts), splits)
    out, modifier = torch.empty_like(q), scores.modifier or ScoreModifier()
    sinks = partial.sums if modifier.sinks is None else modifier.sinks.to(partial.sums)
    for part in parts:
        _first_pass(q, spec, plan, kv, scores, part, partial)
        _add_splits[(part.rows, heads)](
            partial.sums, partial.ends, out, plan, sinks, part.first_row, splits, step.pinned, HEADS=heads,
            D=d, WIDTH=_width(d), WINDOW=scores.window, SINKS=modifier.sinks is not None, SPLIT=SPLIT,
            TOGETHER=TOGETHER, enable_fp_fusion=False,
        )  # fmt: skip
    return out.view(len(q), heads * d)


class _Partial(NamedTuple):
    """Of the first pass.

    sums: [rows, H, splits, WIDTH], weights times V.  ends: [rows, H, splits, 2], highest score and mass.
    """

    sums: Tensor
    ends: Tensor


def _partial(q: Tensor, spec: AttentionShape, rows: int, splits: int) -> _Partial:
    sums = q.new_empty(rows, spec.heads, splits, _width(spec.head_dim), dtype=torch.float32)
    return _Partial(sums, q.new_empty(*sums.shape[:3], 2, dtype=torch.float32))


def _first_pass(
    q: Tensor, spec: AttentionShape, plan: Plan, kv: LayerKV, scores: Scores, part: _Part, partial: _Partial
) -> None:
    """Both kinds of programs have tiles of one shape: a sum over a tile depends on how it is laid out."""
    step, modifier = kv.step_input, scores.modifier or ScoreModifier()
    slopes = partial.sums if modifier.slopes is None else modifier.slopes.to(partial.sums)
    group, splits = spec.heads // spec.kv_heads, _splits(step.max_seq_len)
    lanes = triton.next_power_of_2(group)
    rows = max(1, min(PIECE, TILE // lanes))
    grids = [(False, (part.pieces * (PIECE // rows), spec.kv_heads, splits))]
    if step.max_path_len:
        # of the rows of a piece, one may have the path of another in its table, and one of its own
        most = _splits(2 * step.max_path_len + BLOCK) + 1
        grids.append((True, (part.rows, spec.kv_heads, min(splits, most))))
    kind = "attention", q.device, q.dtype, kv.pool.dtype, _width(spec.head_dim), rows * lanes
    for own, grid in grids:
        launch(
            _sum_split[grid], kind, STAGES,
            q, Planes.of(kv.pool, kv.layer), plan, slopes, partial.sums, partial.ends, part.first_piece,
            part.first_row, splits, scores.scale, modifier.cap, step.pinned, step.max_path_len,
            HEADS=spec.heads, GROUP=group, LANES=max(lanes, LEAST_ROWS // rows), ROWS=rows,
            PIECES=PIECE // rows, D=spec.head_dim, WIDTH=_width(spec.head_dim), WINDOW=scores.window,
            CAP=modifier.cap > 0, SLOPES=modifier.slopes is not None, INT8=kv.pool.dtype == torch.int8,
            OWN=own, BLOCK=BLOCK, SPLIT=SPLIT, enable_fp_fusion=False,
        )  # fmt: skip


def same_with_paths(spec: AttentionShape, device: torch.device, dtype: torch.dtype) -> bool:
    """Whether a device gives a row the same sums where its last keys are in a path and in its slot table.

    Compared in float32: a result that is rounded to `dtype` rarely shows a difference.
    """
    cap = getattr(spec, "cap", 0.0)  # of a decoder's layer
    return _same_with_paths(spec.heads, spec.kv_heads, spec.head_dim, device, dtype, cap)


@lru_cache
def _same_with_paths(
    heads: int, kv_heads: int, d: int, device: torch.device, dtype: torch.dtype, cap: float = 0.0
) -> bool:
    spec: Any = SimpleNamespace(heads=heads, kv_heads=kv_heads, head_dim=d)
    keys, own = 2 * SPLIT, BLOCK // 2  # two splits, of which all rows share one and a part of the other
    pool, table = Pool(1, kv_heads, d, keys, dtype, device), array("i", range(keys))
    pool.data.copy_(torch.linspace(0, 1e4, pool.data.numel()).sin().view_as(pool.data))
    q = torch.linspace(0, 1e3, PIECE * heads * d).cos().view(PIECE, heads, d).to(device, dtype)
    chain, node = StepInput(), StepInput()
    chain.chain(table, keys - PIECE, [0] * PIECE)
    node.node(table, keys - own, table[keys - own :].tolist(), 0)
    found = []
    for step in (chain.build(), node.build()):
        n = step.length  # the last row is the same in both
        partial = _partial(q, spec, n, _splits(keys))
        kv, part, scores = LayerKV(step, pool), _Part(0, 1, 0, n), Scores(d**-0.5, 0, ScoreModifier(cap))
        _first_pass(q[PIECE - n :], spec, plan_of(step, device), kv, scores, part, partial)
        found.append((partial.sums[-1], partial.ends[-1]))
    return all(map(torch.equal, *found))


def _splits(keys: int) -> int:
    return int(triton.cdiv(keys, SPLIT))


def _width(head_dim: int) -> int:
    return max(16, int(triton.next_power_of_2(head_dim)))
