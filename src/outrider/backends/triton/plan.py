"""A step on the device, as the kernels read it: int32 numbers, cut into arrays."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from itertools import pairwise
from operator import add
from typing import NamedTuple

import torch
from torch import Tensor

from outrider.core.device import to_device
from outrider.core.step_input import StepInput

ALIGNED = 4  # numbers: every array begins at a multiple of 16 bytes
PIECE = 16  # rows of one request that a program of the attention computes at most
ALL = (1 << 31) - 1
NOT_STORED = -1  # slot of a row that pads a step


class Sizes(NamedTuple):
    """Numbers of a step that its launches depend on, and the places of its arrays.

    rows, pieces: N and P of `Plan`.  keys: most keys of a row.  path: slots of the longest path.
    table: slots of all tables.  pinned: as in `StepInput`.
    """

    rows: int
    pieces: int
    keys: int
    path: int
    table: int
    pinned: int

    @staticmethod
    def of(step: StepInput, tables: Tables | None = None, more: int = 0) -> Sizes:
        """tables: of this step and others.  more: keys that later steps add to each table."""
        pieces = step.length
        if not _one_row_each(step):
            pieces = sum([-(-(end - first) // PIECE) for first, end in pairwise(step.query_start)])
        table = len((tables or tables_of(step, more)).slots)
        return Sizes(step.length, pieces, step.max_seq_len + more, step.max_path_len, table, step.pinned)

    @property
    def lengths(self) -> list[int]:
        """Of the arrays, in the order of `Plan`."""
        return [self.rows] * 7 + [self.rows * self.path, 3 * self.pieces, self.table]


class Plan(NamedTuple):
    """int32 arrays of a step of N rows.

    positions, slots, contexts: [N], as in `StepInput`; K/V of a slot below 0 are not stored
    num_keys: [N], context and path
    shifts:   [N], text position minus number of the keys after the pinned ones
    shared:   [N], keys that all rows of its piece have in the slot table, ALL if none has a path
    tables:   [N], where the slot table of the row's request begins in `table_slots`
    path_slots:  [N, longest path]
    pieces:   [P, 3], neighbouring rows of one request: the first, how many, and `shared`
    table_slots: the slot tables of all requests, one after another
    """

    positions: Tensor
    slots: Tensor
    contexts: Tensor
    num_keys: Tensor
    shifts: Tensor
    shared: Tensor
    tables: Tensor
    path_slots: Tensor
    pieces: Tensor
    table_slots: Tensor

    @staticmethod
    def of(flat: Tensor, sizes: Sizes) -> Plan:
        """The plan in a tensor that `load_step` has filled."""
        parts, start = [], 0
        for length in sizes.lengths:
            parts.append(flat[start : start + max(1, length)])
            start += aligned(length)
        return Plan._make(parts)


def plan_of(step_input: StepInput, device: torch.device) -> Plan:
    """The plan of a built step on a device, made once."""
    return step_input.derived((plan_of, device), lambda step: _make(step, device))


def install(step_input: StepInput, device: torch.device, plan: Plan) -> None:
    """Let `plan_of` of a step on a device be a plan that is there already."""
    step_input.derived((plan_of, device), lambda _: plan)


def _make(step: StepInput, device: torch.device) -> Plan:
    sizes, tables = Sizes.of(step), tables_of(step)
    flat = torch.frombuffer(columns_of(step, sizes, tables) + tables.slots, dtype=torch.int32)
    plan = Plan.of(to_device(flat, device), sizes)
    if step.device_paths is not None:
        load_paths(plan, step.device_paths, sizes)
    return plan


def load(flat: Tensor, numbers: array[int]) -> None:
    """Fill the begin of a tensor, in one transfer."""
    flat[: len(numbers)].copy_(torch.frombuffer(numbers, dtype=torch.int32), non_blocking=True)


def load_step(flat: Tensor, before: array[int], step: StepInput, sizes: Sizes) -> None:
    """Fill a tensor with other numbers and the plan of a step behind them, in one transfer."""
    tables = tables_of(step)
    load(flat, before + columns_of(step, sizes, tables) + tables.slots)
    if step.device_paths is not None:
        load_paths(Plan.of(flat[len(before) :], sizes), step.device_paths, sizes)


def load_paths(plan: Plan, known: Tensor, sizes: Sizes) -> None:
    """Copy the paths that only a device knows, `StepInput.device_paths`, into the plan of a step."""
    paths = plan.path_slots[: sizes.rows * sizes.path].view(sizes.rows, sizes.path)
    paths[: known.shape[0], : known.shape[1]].copy_(known)


def total(sizes: Sizes) -> int:
    """Numbers of a plan."""
    return sum(map(aligned, sizes.lengths))


def aligned(length: int) -> int:
    """Numbers from the begin of an array to that of the next."""
    return length + ALIGNED + -length % ALIGNED  # none is empty


class Tables:
    """The slot tables of some steps as far as they are read, one after another.

    slots: of all.  places: where that of the table with an id begins.
    """

    def __init__(self, steps: Iterable[StepInput], more: int = 0) -> None:
        """more: entries that are read besides"""
        tables: dict[int, array[int]] = {}
        lengths: dict[int, int] = {}
        for step in steps:
            for table, length in zip(step.slot_tables, _longest_contexts(step)):
                key = id(table)
                if length > lengths.get(key, -1):
                    tables[key], lengths[key] = table, length
        self.slots, self.places = array("i"), dict[int, int]()
        for key, table in tables.items():
            self.places[key] = len(self.slots)
            self.slots += table[: lengths[key] + more]
        self.slots.extend([0] * (ALIGNED - len(self.slots)))  # none is empty


def _one_row_each(step: StepInput) -> bool:
    """Whether every request has one row, as in a level of chains."""
    return len(step.slot_tables) == step.length


def _longest_contexts(step: StepInput) -> Sequence[int]:
    """The longest context of a row of each request."""
    if _one_row_each(step):
        return step.context_lens
    return [max(step.context_lens[first:end]) for first, end in pairwise(step.query_start)]


def tables_of(step: StepInput, more: int = 0) -> Tables:
    """The slot tables of a built step, made once."""
    return step.derived((Tables, more), lambda step: Tables([step], more))


def columns_of(step: StepInput, sizes: Sizes, shared_tables: Tables) -> array[int]:
    """A plan's numbers before `table_slots`, which are those of `shared_tables`.

    sizes: of the step, or larger ones.  Rows beyond those of the step have no keys and store no K/V, and
    pieces beyond its pieces have no rows.
    """
    places = [shared_tables.places[id(table)] for table in step.slot_tables]
    if not _one_row_each(step):
        requests = zip(places, pairwise(step.query_start))
        places = [place for place, (first, end) in requests for _ in range(first, end)]
    keys, shifts = step.context_lens, list[int]()
    if step.max_path_len:
        keys = [*map(add, keys, step.path_lens)]
    if step.shifted:
        shifts = [max(0, position + 1 - seen) for position, seen in zip(step.positions, keys)]
    shared, pieces = _pieces(step)
    padding = sizes.rows - step.length
    arrays: list[Sequence[int]] = [
        step.positions,
        [*step.slot_mapping, *[NOT_STORED] * padding],
        step.context_lens,
        keys,
        shifts,
        [*shared, *[ALL] * padding],
        places,
        _widened(step, sizes.path),
        pieces,
    ]
    *lengths, _ = sizes.lengths
    flat, start = array("i", bytes(4 * sum(map(aligned, lengths)))), 0
    for numbers, length in zip(arrays, lengths):
        flat[start : start + len(numbers)] = array("i", numbers)
        start += aligned(length)
    return flat


def _widened(step: StepInput, path: int) -> Sequence[int]:
    """`path_slots` with so many slots a row."""
    if path == step.max_path_len or not step.max_path_len:
        return step.path_slots
    wide, blank = array("i"), array("i", [0] * (path - step.max_path_len))
    for row in range(step.length):
        wide += step.path_slots[row * step.max_path_len : (row + 1) * step.max_path_len] + blank
    return wide


def _pieces(step: StepInput) -> tuple[list[int], list[int]]:
    """`Plan.shared` and `Plan.pieces`: consecutive rows of one request."""
    shared, pieces = list[int](), list[int]()
    if _one_row_each(step) and not step.max_path_len:
        pieces = [0, 1, ALL] * step.length
        pieces[::3] = range(step.length)
        return [ALL] * step.length, pieces
    if not step.max_path_len:
        for first, end in pairwise(step.query_start):
            for at in range(first, end, PIECE):
                pieces += at, min(PIECE, end - at), ALL
        return [ALL] * step.length, pieces
    for first, end in pairwise(step.query_start):
        for at in range(first, end, PIECE):
            rows = range(at, min(at + PIECE, end))
            least = min((step.context_lens[row] for row in rows if step.path_lens[row]), default=ALL)
            shared += [least] * len(rows)
            pieces += at, len(rows), least
    return shared, pieces
