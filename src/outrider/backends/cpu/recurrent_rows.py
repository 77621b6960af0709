"""`RecurrentRows` of recurrent.h: the path of a step, and the memory of a decoder's recurrent layers."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from outrider.backends.cpu.recurrence import forest_of
from outrider.backends.recurrent_path import RecurrentPath, path_of
from outrider.cache.states import StatePool
from outrider.core.step_input import StepInput

FLOAT = 4  # bytes
ROOM = 16  # draft nodes that there is room for at least, once a step drafts


class Addresses(NamedTuple):
    """Addresses of the memory of each recurrent layer: tails, states and kept inputs.

    room: draft nodes whose inputs can be kept
    """

    tails: array[int]
    states: array[int]
    kept: array[int]
    room: int


class PathWords:
    """The struct of a step as words of 64 bits, and the arrays that it points into; the last three are those
    of the memory, which may move."""

    def __init__(self, step_input: StepInput) -> None:
        self.path = path = step_input.derived(RecurrentPath, path_of)
        self.forest = forest_of(path.path)
        self.replayed, self.drafted = array("i", path.replayed), array("i", path.drafted)
        rows = self.replayed, self.drafted
        sizes, at = [len(part) for part in rows], [part.buffer_info()[0] for part in rows]
        self.words = array("q", (*self.forest.words, *sizes, *at, 0, 0, 0))
        self.memory: Addresses | None = None

    def at(self, pool: StatePool) -> int:
        """Address of the struct with the memory of this pool."""
        pool.grow(self.path.path.num_slots)
        self.memory = found = addresses_of(pool, len(self.drafted))
        own = [part.buffer_info()[0] for part in (found.tails, found.states, found.kept)]
        self.words[-3:] = array("q", own)
        return self.words.buffer_info()[0]


def attach(rows: Any, step_input: StepInput, pool: StatePool) -> None:
    """Let `Rows` of a step point at its recurrent rows.  The step keeps them alive."""
    rows.recurrent = step_input.derived(PathWords, PathWords).at(pool)


def addresses_of(pool: StatePool, drafted: int) -> Addresses:
    """The addresses, made when memory has moved: a tensor takes 10 µs to tell its own right behind a forward.

    drafted: number of draft nodes of the step, for whose inputs room is made.  There is more, so that memory
        seldom moves, as far as that is planned.  A pool of which no step drafts keeps no inputs.
    """
    found: Addresses | None = pool.addresses
    if found is None or found.room < drafted:
        ahead = min(max(ROOM, 2 * drafted), pool.planned_nodes) if drafted else 0
        room = max(drafted, 0 if found is None else found.room, ahead)
        for i in range(0, len(pool.states), 2):
            pool.kept[i] = (_longer(pool.kept[i], room, pool.input_bytes[i] // FLOAT),)
        kept = [own for (own,) in pool.kept[::2]]
        parts = _addresses(pool.states[::2]), _addresses(pool.states[1::2]), _addresses(kept)
        found = pool.addresses = Addresses(*parts, len(kept[0]))
    return found


def _longer(kept: Sequence[Tensor], rows: int, width: int) -> Tensor:
    """A tensor [at least rows, width] that begins with what was kept."""
    if not kept:
        return torch.zeros(rows, width)
    (before,) = kept
    return before if len(before) >= rows else torch.cat([before, torch.zeros(rows - len(before), width)])


def _addresses(tensors: Sequence[Tensor]) -> array[int]:
    return array("q", [tensor.data_ptr() for tensor in tensors])
