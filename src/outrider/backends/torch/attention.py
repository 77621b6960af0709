"""Attention of a whole step in torch, batched over requests.

The result of a row must not depend on the other rows or on padding.  Nor may it depend on whether its keys
lie in the slot table or in the path of a tree node.  Three rules ensure that on a CPU:

  - The keys of a row are counted 0, 1, 2, … in the order of their positions.  All products are taken per
    128 keys, at multiples of 128, and those of weights and values added in order.  Padding adds exact zeros.
  - All products have the same inner shapes: a multiple of 8 rows, 128 keys, a multiple of 8 columns.  BLAS
    picks its kernel by shape.
  - Sums are float64 and rounded once.  A kernel with another order still gives the same float32 or bfloat16.

Rows are collected into groups of the same padded size.  So a long prompt does not pad the decode rows:

        table part    keys that the rows of a request share, [B, S] slots of its table
        path part     for tree nodes: from the last multiple of 128 on, each row gathers its own keys,
                      [B, Q, T] slots
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from outrider.backends.base import LayerKV, ScoreModifier, Scores
from outrider.backends.launch import AttentionShape
from outrider.core.device import to_device
from outrider.core.step_input import StepInput

T = TypeVar("T")
BLOCK = 128  # keys a product of weights and values
TILE = 8  # the rows of a product are a multiple
MAX_ROWS = 128  # rows of one request that are computed together; bounds the scores that are held


@dataclass
class Group:
    """B pieces of requests, at most Q rows each, padded with row N.  int64."""

    rows: Tensor  # [B, Q] rows of the step
    positions: Tensor  # [B, Q]
    num_keys: Tensor  # [B, Q]
    shift: Tensor  # [B, Q] position offset of the keys after the pinned ones
    table_slots: Tensor  # [B, S]
    path_slots: Tensor  # [B, Q, T]; T is 0 if no row has a path
    keys: Tensor  # [B, S + T] the number of each key; the path part counts on from the end of the table part
    pinned: int


class _Sizes(NamedTuple):
    """Sizes to which the pieces of a group are padded.

    rows: of a piece.  table_slots, path_slots: keys of a piece in its table, and of each row in its path
    """

    rows: int
    table_slots: int
    path_slots: int


@dataclass
class _Piece:
    """Rows of one request, on the host."""

    rows: list[int]
    table_slots: list[int]
    path_slots: list[list[int]]  # of each row

    @property
    def path_len(self) -> int:
        return max(map(len, self.path_slots))


def prepare(step_input: StepInput, device: torch.device) -> list[Group]:
    """The groups of a step."""
    by_sizes: dict[_Sizes, list[_Piece]] = defaultdict(list)
    for piece in _pieces(step_input):
        sizes = _Sizes(_rounded(len(piece.rows)), _blocks(len(piece.table_slots)), _blocks(piece.path_len))
        by_sizes[sizes].append(piece)
    return [_group(step_input, pieces, sizes, device) for sizes, pieces in by_sizes.items()]


def _pieces(step_input: StepInput) -> list[_Piece]:
    pieces = []
    for request, table in enumerate(step_input.slot_tables):
        rows = range(*step_input.query_start[request : request + 2])
        known = [row for row in rows if not step_input.path_lens[row]]
        nodes = [row for row in rows if step_input.path_lens[row]]
        for part in _parts(known):
            seen = max(step_input.context_lens[row] for row in part)
            pieces.append(_Piece(part, table[:seen].tolist(), [[]] * len(part)))
        for part in _parts(nodes):
            shared = min(step_input.context_lens[row] for row in part) // BLOCK * BLOCK
            own = [step_input.key_slots(row, shared) for row in part]
            pieces.append(_Piece(part, table[:shared].tolist(), own))
    return pieces


def _parts(rows: list[int]) -> list[list[int]]:
    """The rows in parts of MAX_ROWS at most."""
    return [rows[at : at + MAX_ROWS] for at in range(0, len(rows), MAX_ROWS)]


def _rounded(n: int) -> int:
    """n rounded up: to a power of two up to 8, then by at most a fourth."""
    step = 1 << max(0, (n - 1).bit_length() - 3) if n > 8 else n
    return -(-n // step) * step if n > 8 else 1 << (n - 1).bit_length()


def _blocks(keys: int) -> int:
    return _rounded(-(-keys // BLOCK)) * BLOCK if keys else 0


def _group(step_input: StepInput, pieces: list[_Piece], sizes: _Sizes, device: torch.device) -> Group:
    """The group of pieces that are padded to the same sizes."""
    q, s, t = sizes
    tables, paths, splits = list[list[int]](), list[list[list[int]]](), list[list[int]]()
    for piece in pieces:
        # padding repeats a slot of the request itself: values that are not finite stay within it
        own_slot = (piece.table_slots or piece.path_slots[0])[0]
        tables.append(_padded(piece.table_slots, s, own_slot))
        paths.append([_padded(slots, t, own_slot) for slots in _padded(piece.path_slots, q, [])])
        splits.append([len(piece.table_slots)])

    def of_rows(number: Callable[[int], int], padding: int) -> Tensor:
        """A number of each row of the pieces, [B, Q]."""
        columns = [_padded([number(row) for row in piece.rows], q, padding) for piece in pieces]
        return torch.tensor(columns, device=device)

    path_slots = torch.tensor(paths, dtype=torch.int64).view(len(pieces), q, t).to(device)
    if step_input.device_paths is not None:
        _set_paths(path_slots, step_input.device_paths, step_input, pieces)
    split = torch.tensor(splits)
    of_table, of_path = torch.arange(s).expand(len(pieces), -1), split + torch.arange(t)
    # padding of the table part has numbers that no row sees
    of_table = of_table.masked_fill(of_table >= split, torch.iinfo(torch.int64).max // 2)
    return Group(
        rows=of_rows(lambda row: row, step_input.length),
        positions=of_rows(lambda row: step_input.positions[row], 0),
        num_keys=of_rows(lambda row: step_input.context_lens[row] + step_input.path_lens[row], 1),
        shift=of_rows(step_input.key_shift, 0),
        table_slots=torch.tensor(tables, dtype=torch.int64, device=device),
        path_slots=path_slots,
        keys=torch.cat([of_table, of_path], dim=1).to(device),
        pinned=step_input.pinned,
    )


def _set_paths(path_slots: Tensor, paths: Tensor, step_input: StepInput, pieces: list[_Piece]) -> None:
    """Overwrite the slots of paths that only a device knows in path_slots [B, Q, T]."""
    places = [
        (b, i, row, step_input.context_lens[row] - len(piece.table_slots))
        for b, piece in enumerate(pieces)
        for i, row in enumerate(piece.rows)
    ]
    b, i, rows, first = to_device(torch.tensor(places).T, path_slots.device)
    at = first[:, None] + torch.arange(paths.shape[1], device=paths.device)
    path_slots[b[:, None], i[:, None], at] = paths[rows].long()


def _padded(values: Sequence[T], size: int, padding: T) -> list[T]:
    return [*values, *[padding] * (size - len(values))]


def attend(
    groups: list[Group], q: Tensor, spec: AttentionShape, kv: LayerKV, asked: Scores, wide: torch.dtype
) -> Tensor:
    """`Backend.attend` of q [N, H, D] with sums in the dtype `wide`; [N, H·D]."""
    n, d, kv_heads = len(q), spec.head_dim, spec.kv_heads
    padded = F.pad(q.view(n, spec.heads, d), (0, 0, 0, 0, 0, 1))
    out = torch.empty(n + 1, spec.heads, d, dtype=q.dtype, device=q.device)
    for group in groups:
        b, width = group.rows.shape
        heads = padded[group.rows].to(wide).view(b, width, kv_heads, -1, d).transpose(1, 2)  # [B, k, Q, G, D]
        table, path = (
            kv.pool.read(kv.layer, part.flatten(), wide) for part in (group.table_slots, group.path_slots)
        )
        table = table.reshape(2, *group.table_slots.shape, kv_heads, d).transpose(2, 3)  # [2, B, k, S, D]
        path = path.reshape(2, *group.path_slots.shape, kv_heads, d)
        path = path.permute(0, 1, 4, 2, 3, 5)  # [2, B, k, Q, T, D]
        scores = torch.cat([_scores(heads, table[0]), _own_scores(heads, path[0])], dim=-1) * asked.scale
        weights, extra = _weights(scores, group, asked.window, asked.modifier)
        split = table.shape[3]
        summed = _weighted(weights[..., :split], table[1])
        summed = _add_own(summed, weights[..., split:], path[1])
        found = summed[..., :d] / (summed[..., d : d + 1] + extra)
        out[group.rows] = found.transpose(1, 2).flatten(2, 3).to(q.dtype)
    return out[:n].flatten(1)


def _scores(heads: Tensor, keys: Tensor) -> Tensor:
    """heads [B, k, Q, G, D], keys [B, k, S, D] -> [B, k, Q, G, S]."""
    rows = heads.flatten(2, 3)
    return _by_block(rows, keys)[:, :, : rows.shape[2]].view(*heads.shape[:4], -1)


def _own_scores(heads: Tensor, keys: Tensor) -> Tensor:
    """The same with keys [B, k, Q, T, D] of each row."""
    return _by_block(heads, keys)[..., : heads.shape[3], :]


def _by_block(rows: Tensor, keys: Tensor) -> Tensor:
    """rows [..., R, D] times keys [..., S, D], BLOCK keys a product: [..., R filled up to TILE, S].

    The blocks are contiguous, since BLAS has another kernel for a transposed factor.
    """
    blocks = keys.reshape(*keys.shape[:-2], -1, BLOCK, keys.shape[-1]).transpose(-1, -2).contiguous()
    return (_tiled(rows).unsqueeze(-3) @ blocks).transpose(-2, -3).flatten(-2)


def _tiled(x: Tensor) -> Tensor:
    """x [..., n, m] with n filled up to a multiple of TILE."""
    return F.pad(x, (0, 0, 0, -x.shape[-2] % TILE))


def _weights(
    scores: Tensor, group: Group, window: int, modifier: ScoreModifier | None
) -> tuple[Tensor, Tensor | float]:
    """exp(score - highest) of scores [B, k, Q, G, S + T], and the sink's addition to their sum.

    Weights of keys that a row does not attend to are 0.
    """
    keys, last = group.keys[:, None], group.positions[..., None]  # [B, 1, S + T], [B, Q, 1]
    at = keys + (keys >= group.pinned) * group.shift[..., None]  # the position of each key
    hidden = keys >= group.num_keys[..., None]
    if window > 0:
        hidden |= at <= last - window
    elif window:
        hidden |= at < last // -window * -window
    sinks = None
    if modifier is not None:
        by_head = (1, scores.shape[1], 1, scores.shape[3], 1)
        if modifier.cap:
            scores = modifier.cap * torch.tanh(scores / modifier.cap)
        if modifier.slopes is not None:
            scores = scores + modifier.slopes.to(scores).view(by_head) * (at - last)[:, None, :, None]
        if modifier.sinks is not None:
            sinks = modifier.sinks.to(scores).view(by_head)
    scores = scores.masked_fill(hidden[:, None, :, None], float("-inf"))
    highest = scores.amax(-1, keepdim=True)
    if sinks is None:
        return (scores - highest).exp_(), 0.0
    highest = torch.maximum(highest, sinks)
    return (scores - highest).exp_(), (sinks - highest).exp()


def _weighted(weights: Tensor, values: Tensor) -> Tensor:
    """Sums of weights [B, k, Q, G, S] times values [B, k, S, D], as `_with_ones` has the columns."""
    values, rows = _with_ones(values), weights.flatten(2, 3)
    summed = weights.new_zeros(*rows.shape[:3], values.shape[-1])
    for at in range(0, values.shape[2], BLOCK):
        product = _tiled(rows[..., at : at + BLOCK]) @ values[:, :, at : at + BLOCK]
        summed += product[:, :, : rows.shape[2]]
    return summed.view(*weights.shape[:4], -1)


def _add_own(summed: Tensor, weights: Tensor, values: Tensor) -> Tensor:
    """Add the sums of weights [B, k, Q, G, T] and values [B, k, Q, T, D] of each row."""
    values = _with_ones(values)
    for at in range(0, values.shape[3], BLOCK):
        product = _tiled(weights[..., at : at + BLOCK]) @ values[:, :, :, at : at + BLOCK]
        summed = summed + product[..., : weights.shape[3], :]
    return summed


def _with_ones(values: Tensor) -> Tensor:
    """values [..., D], a column of ones that sums the weights, and zeros up to a multiple of TILE columns.

    With another number of columns, MKL on AVX2 lets the result depend on a row's place within the tile.
    """
    ones = F.pad(values, (0, 1), value=1.0)
    return F.pad(ones, (0, -ones.shape[-1] % TILE))
