"""A step on the device, as the kernels read it: one transfer of int32 numbers, cut into arrays."""

from __future__ import annotations

import operator
from array import array
from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from outrider.core.step_input import StepInput

ALIGNED = 4  # numbers: every array begins at a multiple of 16 bytes
PIECE = 16  # rows of one request that a program of the attention computes at most
ALL = (1 << 31) - 1


class Plan(NamedTuple):
    """int32 arrays of a step of N rows.

    input_ids, positions, slots, contexts: [N], as in `StepInput`
    num_keys: [N], context and path
    shifts:   [N], text position minus number of the keys after the pinned ones
    tables:   [N], where the slot table of the row's request begins in `table_slots`
    table_slots: the slot tables of all requests, one after another
    path_slots:  [N, longest path]
    pieces:   [P, 3], neighbouring rows of one request: the first, how many, and the number of keys that all
        of them have in the slot table, ALL if none has a path
    """

    input_ids: Tensor
    positions: Tensor
    slots: Tensor
    contexts: Tensor
    num_keys: Tensor
    shifts: Tensor
    tables: Tensor
    table_slots: Tensor
    path_slots: Tensor
    pieces: Tensor


def plan_of(step_input: StepInput, device: torch.device) -> Plan:
    """The plan of a built step on a device, made once."""
    return step_input.derived((plan_of, device), lambda step: _make(step, device))


def _make(step: StepInput, device: torch.device) -> Plan:
    tables, table_slots = array("i"), array("i")
    for request, table in enumerate(step.slot_tables):
        first, end = step.query_start[request : request + 2]
        tables.extend([len(table_slots)] * (end - first))
        table_slots += table[: max(step.context_lens[first:end])]
    pieces = array("i", [number for piece in _pieces(step) for number in piece])
    arrays = [
        array("i", step.input_ids),
        array("i", step.positions),
        array("i", step.slot_mapping),
        array("i", step.context_lens),
        array("i", map(operator.add, step.context_lens, step.path_lens)),
        array("i", map(step.key_shift, range(step.length))),
        tables,
        table_slots,
        step.path_slots,
        pieces,
    ]
    flat, starts = array("i"), []
    for numbers in arrays:
        starts.append(len(flat))
        flat += numbers
        flat.extend([0] * (ALIGNED + -len(numbers) % ALIGNED))  # none is empty
    moved = torch.frombuffer(flat, dtype=torch.int32).to(device)
    views = [moved[start : start + max(1, len(part))] for start, part in zip(starts, arrays)]
    return Plan._make([*views[:-1], views[-1].view(-1, 3)])


def _pieces(step: StepInput) -> Iterator[tuple[int, int, int]]:
    for first, end in pairwise(step.query_start):
        for at in range(first, end, PIECE):
            rows = range(at, min(at + PIECE, end))
            shared = min((step.context_lens[row] for row in rows if step.path_lens[row]), default=ALL)
            yield at, len(rows), shared
