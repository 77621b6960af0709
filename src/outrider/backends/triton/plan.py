"""A step on the device, as the kernels read it: one transfer of int32 numbers, cut into arrays."""

from __future__ import annotations

import operator
from array import array
from collections.abc import Iterator
from itertools import pairwise
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
    def of(step: StepInput) -> Sizes:
        pieces = sum(-(-(end - first) // PIECE) for first, end in pairwise(step.query_start))
        table = sum(_keys_in_table(step, request) for request in range(len(step.slot_tables)))
        return Sizes(step.length, pieces, step.max_seq_len, step.max_path_len, table, step.pinned)

    @property
    def lengths(self) -> list[int]:
        """Of the arrays, in the order of `Plan`."""
        return [self.rows] * 6 + [self.rows * self.path, 3 * self.pieces, self.table]


class Plan(NamedTuple):
    """int32 arrays of a step of N rows.

    positions, slots, contexts: [N], as in `StepInput`; K/V of a slot below 0 are not stored
    num_keys: [N], context and path
    shifts:   [N], text position minus number of the keys after the pinned ones
    tables:   [N], where the slot table of the row's request begins in `table_slots`
    path_slots:  [N, longest path]
    pieces:   [P, 3], neighbouring rows of one request: the first, how many, and the number of keys that all
        of them have in the slot table, ALL if none has a path
    table_slots: the slot tables of all requests, one after another
    """

    positions: Tensor
    slots: Tensor
    contexts: Tensor
    num_keys: Tensor
    shifts: Tensor
    tables: Tensor
    path_slots: Tensor
    pieces: Tensor
    table_slots: Tensor

    @staticmethod
    def of(flat: Tensor, sizes: Sizes) -> Plan:
        """The plan in a tensor that `numbers_of` has filled."""
        parts, start = [], 0
        for length in sizes.lengths:
            parts.append(flat[start : start + max(1, length)])
            start += _aligned(length)
        return Plan._make(parts)


def plan_of(step_input: StepInput, device: torch.device) -> Plan:
    """The plan of a built step on a device, made once."""
    return step_input.derived((plan_of, device), lambda step: _make(step, device))


def _make(step: StepInput, device: torch.device) -> Plan:
    sizes = Sizes.of(step)
    flat = torch.frombuffer(numbers_of(step, sizes), dtype=torch.int32)
    plan = Plan.of(to_device(flat, device), sizes)
    load_paths(plan, step, sizes)
    return plan


def load_paths(plan: Plan, step: StepInput, sizes: Sizes) -> None:
    """Copy the paths that only a device knows into the plan of a step."""
    if step.device_paths is not None:
        paths = plan.path_slots[: sizes.rows * sizes.path].view(sizes.rows, sizes.path)
        paths[: step.length, : step.max_path_len].copy_(step.device_paths)


def total(sizes: Sizes) -> int:
    """Numbers of a plan."""
    return sum(map(_aligned, sizes.lengths))


def numbers_of(step: StepInput, sizes: Sizes) -> array[int]:
    """A plan's numbers, without the end of a longer `table_slots`.

    sizes: of the step, or larger ones.  Rows beyond those of the step have no keys and store no K/V, and
    pieces beyond its pieces have no rows.
    """
    tables, table_slots = array("i"), array("i")
    for request, table in enumerate(step.slot_tables):
        first, end = step.query_start[request : request + 2]
        tables.extend([len(table_slots)] * (end - first))
        table_slots += table[: _keys_in_table(step, request)]
    arrays = [
        array("i", step.positions),
        array("i", step.slot_mapping),
        array("i", step.context_lens),
        array("i", map(operator.add, step.context_lens, step.path_lens)),
        array("i", map(step.key_shift, range(step.length))),
        tables,
        _widened(step, sizes.path),
        array("i", [number for piece in _pieces(step) for number in piece]),
    ]
    flat = array("i")
    for i, (numbers, length) in enumerate(zip(arrays, sizes.lengths)):
        blank = NOT_STORED if i == Plan._fields.index("slots") else 0
        flat += numbers
        flat.extend([blank] * (_aligned(length) - len(numbers)))
    flat += table_slots
    return flat


def _aligned(length: int) -> int:
    return length + ALIGNED + -length % ALIGNED  # none is empty


def _keys_in_table(step: StepInput, request: int) -> int:
    return max(step.context_lens[step.query_start[request] : step.query_start[request + 1]])


def _widened(step: StepInput, path: int) -> array[int]:
    """`path_slots` with so many slots a row."""
    if path == step.max_path_len:
        return step.path_slots
    wide, blank = array("i"), array("i", [0] * (path - step.max_path_len))
    for row in range(step.length):
        wide += step.path_slots[row * step.max_path_len : (row + 1) * step.max_path_len] + blank
    return wide


def _pieces(step: StepInput) -> Iterator[tuple[int, int, int]]:
    for first, end in pairwise(step.query_start):
        for at in range(first, end, PIECE):
            rows = range(at, min(at + PIECE, end))
            shared = min((step.context_lens[row] for row in rows if step.path_lens[row]), default=ALL)
            yield at, len(rows), shared
