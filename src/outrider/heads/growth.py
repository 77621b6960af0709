"""Growth of draft trees on a device, level by level, after `device_trees.py` has laid out their forwards.

host     forwards of all levels ─▶                                            ─▶ one read: the trees
device   first logits │ Levels.add → LevelInput │ forward, logits │ … │ Levels.finish
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from outrider.backends.launch import on_device
from outrider.core.device import Numbers
from outrider.core.row import Row
from outrider.core.step_input import StepInput
from outrider.heads.choose import Chooser, RankingInputs

S = TypeVar("S")


class LevelInput(NamedTuple):
    """Input of the forward of one level, as far as it depends on tokens.

    ids:     int64 [rows], the token of each row
    sources: int64 [rows], the row of its parent in the last logits
    paths:   int32 [rows, level], the slots of its path; None where the host knows them
    """

    ids: Tensor
    sources: Tensor
    paths: Tensor | None


class Levels(Protocol):
    """The levels of trees that grow on the device, so far."""

    def add(self, level: int, tokens: Tensor, confidences: Tensor, num_rows: int) -> LevelInput:
        """Add a level to every tree, from the best tokens after the rows of the last forward.

        tokens, confidences: int64 and float32 [rows of the last forward, k].  num_rows: of the next forward
        """

    def finish(self, level: int, tokens: Tensor, confidences: Tensor) -> Tensor:
        """Add the last level.  Returns the nodes of all trees, as `DeviceGrowth.set_trees` takes them."""


class GrowthShape(Protocol):
    """Sizes of trees that grow together, hashable.  k: tokens that `Levels` takes for each row of logits."""

    @property
    def levels(self) -> int: ...
    @property
    def k(self) -> int: ...

    def begin(self, tables: Sequence[Tensor]) -> Levels:
        """tables: those of `DeviceGrowth`, on the device; blank rows may follow"""


class DeviceGrowth(Protocol):
    """Trees that grow together on the device, and all that the host decides before any token is known.

    tables:    index tables of `Levels`
    requests:  the request of each row of the logits, by level; in the first, one for each tree, in order
    forwards:  the inputs of the forwards between these logits, built
    """

    @property
    def shape(self) -> GrowthShape: ...
    @property
    def tables(self) -> Sequence[Numbers]: ...
    @property
    def requests(self) -> Sequence[Sequence[Row]]: ...
    @property
    def forwards(self) -> Sequence[StepInput]: ...

    def set_trees(self, nodes: Tensor) -> None:
        """Set `device_tree` of all trees, with one read of the device.  nodes: from `Levels.finish`"""


class GrowthPlan(NamedTuple):
    """Inputs of `grow`: the shape, the number of rows of each forward, and by level the `RankingInputs`.

    All levels but the first have inputs for as many rows, at least those of the first; those that a level
    lacks are not read.
    """

    shape: GrowthShape
    row_counts: Sequence[int]
    words: Sequence[Any]
    noise_masks: Sequence[Any]
    tables: Sequence[Any]

    @staticmethod
    def of(growth: DeviceGrowth, choose: Chooser) -> GrowthPlan:
        """The plan of a growth, on the host."""
        first, *others = growth.requests
        most = max(map(len, growth.requests))
        padded = [first, *([*level, *[first[0]] * (most - len(level))] for level in others)]
        inputs = choose.level_inputs(padded)
        return GrowthPlan(
            growth.shape,
            [*map(len, others)],
            [own.words for own in inputs],
            [own.noise_mask for own in inputs],
            growth.tables,
        )

    @property
    def numbers(self) -> list[Any]:
        """All that goes to the device."""
        return [*self.words, *self.noise_masks, *self.tables]

    @staticmethod
    def of_numbers(shape: GrowthShape, row_counts: Sequence[int], numbers: Sequence[Any]) -> GrowthPlan:
        """The plan with these `numbers`."""
        n = shape.levels
        return GrowthPlan(shape, row_counts, numbers[:n], numbers[n : 2 * n], numbers[2 * n :])

    def on(self, device: torch.device) -> GrowthPlan:
        moved = [on_device(part, device) for part in self.numbers]
        return GrowthPlan.of_numbers(self.shape, self.row_counts, moved)

    def best(self, choose: Chooser, level: int, logits: Tensor) -> tuple[Tensor, Tensor]:
        """The best tokens after the first rows of a level, and their confidences, [n, k]."""
        words, noise_mask = self.words[level][: len(logits)], self.noise_masks[level][: len(logits)]
        return choose.top(logits, RankingInputs(words, noise_mask), self.shape.k)


class Front(NamedTuple, Generic[S]):
    """The last forward of growing trees: what a head keeps of its rows, and their logits float32 [n, Vd]."""

    state: S
    logits: Tensor


def grow(
    plan: GrowthPlan, choose: Chooser, front: Front[S], advance: Callable[[int, S, LevelInput], Front[S]]
) -> Tensor:
    """Grow trees on the device, where the plan is.  Returns what `DeviceGrowth.set_trees` takes.

    The host reads nothing.  front: with the logits of the first level.  advance(level, state, input): the
    forward that gives the logits of a further level
    """
    levels = plan.shape.begin(plan.tables)
    for level, num_rows in enumerate(plan.row_counts):
        level_input = levels.add(level, *plan.best(choose, level, front.logits), num_rows)
        front = advance(level + 1, front.state, level_input)
    last = plan.shape.levels - 1
    return levels.finish(last, *plan.best(choose, last, front.logits))


def pad_ranks(tokens: Tensor, confidences: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Tokens and confidences [n, k], of a head that may have fewer than k tokens: -1 and 0 for the others."""
    if (missing := k - tokens.shape[1]) <= 0:
        return tokens, confidences
    return F.pad(tokens, (0, missing), value=-1), F.pad(confidences, (0, missing))


def row_table(levels: Sequence[Sequence[tuple[int, int]]], least: int = 1) -> Numbers:
    """A pair of numbers for each row of each level, as [most rows, levels, 2]; 0 for missing rows.

    least: rows of the table
    """
    most = max([least, *map(len, levels)])
    width = 2 * len(levels)
    numbers, before = array("q", bytes(8 * most * width)), None
    for level, rows in enumerate(levels):
        if rows != before:  # those of chains are alike
            firsts, seconds = array("q", [row[0] for row in rows]), array("q", [row[1] for row in rows])
            before = rows
        numbers[2 * level : len(rows) * width : width] = firsts
        numbers[2 * level + 1 : len(rows) * width : width] = seconds
    return Numbers(numbers, (most, len(levels), 2))
