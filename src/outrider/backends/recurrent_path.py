"""The path of a step through recurrent layers: nodes of the step before that are replayed, then its own rows.

Of the replayed nodes only the states count.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from outrider.backends.recurrence import Path
from outrider.cache.states import StatePool
from outrider.core.device import to_device
from outrider.core.recurrent import RecurrentRows
from outrider.core.step_input import StepInput


@dataclass(frozen=True)
class RecurrentPath:
    """The rows of a recurrent forward: `replayed` nodes, then the rows of the step.

    replayed: numbers of their inputs among the kept ones
    drafted:  rows of the step whose inputs are kept
    """

    path: Path
    replayed: Sequence[int]
    drafted: Sequence[int]
    _on: dict[torch.device, tuple[Tensor | None, Tensor | None]] = field(default_factory=dict, repr=False)

    def on(self, device: torch.device) -> tuple[Tensor | None, Tensor | None]:
        """`replayed` and `drafted` on a device, None for no rows: made once for all recurrences of a step."""
        if device not in self._on:
            self._on[device] = _index(self.replayed, device), _index(self.drafted, device)
        return self._on[device]

    def with_replays(self, inputs: Sequence[Tensor], pool: StatePool, index: int) -> Sequence[Tensor]:
        """Inputs [replayed + N, …] of recurrence `index`, from those [N, …] of the rows of the step.

        Those of the drafted rows are kept for the next forward.
        """
        replayed, drafted = self.on(inputs[0].device)
        before = _select(pool.kept[index], replayed)
        pool.kept[index] = _select(inputs, drafted)
        return [torch.cat(pair) for pair in zip(before, inputs)] if self.replayed else inputs


def path_of(step_input: StepInput) -> RecurrentPath:
    """The recurrent path of a built step."""
    rows = step_input.recurrent or _without_replays(step_input)
    parents, slots, saved, replayed = list[int](), list[int](), set[int](), list[int]()
    last = dict[int, int]()  # slot -> the row of its last replayed node
    copies = dict[int, int]()
    for slot, kept, copied in rows.replays:
        copies.update((len(slots) + place, other) for place, other in copied.items())
        for number in kept:
            parents.append(last.get(slot, -1))
            last[slot] = len(slots)
            slots.append(slot)
            replayed.append(number)
    fresh, drafted, offset = set[int](), list[int](), len(slots)
    for request, (slot, known) in enumerate(zip(rows.slots, rows.last_known)):
        first, end = step_input.query_start[request : request + 2]
        if step_input.positions[first] == 0:
            fresh.add(slot)
        before = last.pop(slot, -1)
        parents += [before, *range(offset + first, offset + known)]
        parents += [offset + parent for parent in _parents(step_input, known, end)]
        slots += [slot] * (end - first)
        drafted += range(known + 1, end)
        saved.add(offset + known)
    saved.update(last.values())  # of requests that this step leaves out
    copies.update((offset + row, slot) for row, slot in rows.copies.items())
    save = [int(row in saved) for row in range(len(slots))]
    return RecurrentPath(Path(parents, slots, save, fresh, copies), replayed, drafted)


def _without_replays(step_input: StepInput) -> RecurrentRows:
    """The requests of a step in the slots 0, 1, …, whose rows without a path are known tokens."""
    rows = RecurrentRows()
    for request in range(len(step_input.slot_tables)):
        first, end = step_input.query_start[request : request + 2]
        known = sum(not length for length in step_input.path_lens[first:end])
        rows.add(request, first + known - 1)
    return rows


def _parents(step_input: StepInput, known: int, end: int) -> list[int]:
    """Parents of the rows after `known`, the last known token: nodes of a chain or a tree."""
    if not any(step_input.path_lens[known + 1 : end]):
        return [*range(known, end - 1)]
    row_of = {step_input.slot_mapping[row]: row for row in range(known + 1, end)}
    parents = list[int]()
    for row in range(known + 1, end):
        path = step_input.node_path(row)
        parents.append(row_of[path[-2]] if len(path) > 1 else known)
    return parents


def _index(rows: Sequence[int], device: torch.device) -> Tensor | None:
    return to_device(torch.tensor(rows), device) if rows else None


def _select(tensors: Sequence[Tensor], rows: Tensor | None) -> Sequence[Tensor]:
    """Copies of some rows."""
    return () if rows is None else [tensor.index_select(0, rows) for tensor in tensors]
