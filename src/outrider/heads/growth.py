"""Growth of draft trees on a device, level by level, once `device_trees.py` has laid them out.

host     lay out rows and steps of all levels                                        read
device   first logits │ Levels.add → Found │ forward, logits │ … │ Levels.end → trees
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from outrider.backends.launch import on_device
from outrider.core.device import Numbers
from outrider.core.row import Row
from outrider.core.step_input import StepInput
from outrider.heads.choose import Chooser


class Found(NamedTuple):
    """The next forward, as far as tokens decide it.

    ids, sources: int64, of every row: its token, and the row of its parent in the last logits
    paths: int32 [rows, level] or None, the slots of their paths, where these depend on tokens
    """

    ids: Tensor
    sources: Tensor
    paths: Tensor | None


class Levels(Protocol):
    """Trees that grow on the device."""

    def add(self, level: int, tokens: Tensor, shares: Tensor, rows: int) -> Found:
        """Add a level to every tree, from the next tokens of the last forward's rows.

        rows: of the next forward
        """

    def end(self, level: int, tokens: Tensor, shares: Tensor) -> Tensor:
        """Add the last level.  Returns what `DeviceGrowth.read` takes."""


class Shape(Protocol):
    """Sizes of trees that grow together, hashable.  k: tokens that `Levels` takes for each row of logits."""

    @property
    def levels(self) -> int: ...
    @property
    def k(self) -> int: ...

    def begin(self, numbers: Sequence[Tensor]) -> Levels:
        """numbers: those of `DeviceGrowth`, maybe with blank rows behind them"""


class DeviceGrowth(Protocol):
    """Trees that are laid out.

    rows:  the request of each row of the logits of every level; the first are of the trees in their order
    steps: the forwards between these logits, built
    """

    @property
    def shape(self) -> Shape: ...
    @property
    def numbers(self) -> Sequence[Numbers]: ...
    @property
    def rows(self) -> Sequence[Sequence[Row]]: ...
    @property
    def steps(self) -> Sequence[StepInput]: ...

    def read(self, found: Tensor) -> None:
        """Set `read` of all trees, by one read of the device."""


class Asked(NamedTuple):
    """What the choice of tokens takes of each level: `words` and `noised` of `Chooser.asked`.

    All levels but the first have as many rows; those that a level lacks are not read.
    """

    words: Sequence[Any]
    noised: Sequence[Any]
    probs: bool

    @staticmethod
    def of(growth: DeviceGrowth, choose: Chooser) -> Asked:
        first, *others = growth.rows
        most = max(map(len, others), default=0)
        rows = [first, *([*level, *[first[0]] * (most - len(level))] for level in others)]
        asked = [choose.asked(own, [level] * len(own)) for level, own in enumerate(rows)]
        return Asked([a.words for a in asked], [a.noised for a in asked], any(a.probs for a in asked))

    def on(self, device: torch.device) -> Asked:
        words, noised = ([on_device(part, device) for part in own] for own in self[:2])
        return Asked(words, noised, self.probs)


def grow(
    shape: Shape,
    numbers: Sequence[Tensor],
    choose: Chooser,
    asked: Asked,
    logits: Tensor,
    rows: Sequence[int],
    advance: Callable[[int, Found], Tensor],
) -> Tensor:
    """Grow trees that are laid out.  Returns what `DeviceGrowth.read` takes; the host reads nothing.

    numbers, asked: of the growth, on the device.  logits: of the first level.  rows: of each later level
    advance: the logits of a level
    """

    def best(level: int) -> tuple[Tensor, Tensor]:
        words, noised = (part[level][: len(logits)] for part in (asked.words, asked.noised))
        return choose.top(logits, words, noised, shape.k, asked.probs)

    levels = shape.begin(numbers)
    for level, count in enumerate(rows):
        logits = advance(level + 1, levels.add(level, *best(level), count))
    return levels.end(shape.levels - 1, *best(shape.levels - 1))


def power_of_two(n: int) -> int:
    """Smallest power of two of at least n, so that few graphs serve many sizes."""
    return 1 << (n - 1).bit_length()


def widened(tokens: Tensor, shares: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Tokens and confidences [n, k] of a head that may have fewer tokens."""
    if (missing := k - tokens.shape[1]) <= 0:
        return tokens, shares
    return F.pad(tokens, (0, missing), value=-1), F.pad(shares, (0, missing))


def by_row(levels: Sequence[Sequence[tuple[int, int]]]) -> Numbers:
    """Pairs of numbers of the rows of all levels, [most rows, levels, 2]; 0 for missing rows."""
    most = max(map(len, levels), default=0) or 1
    numbers = array("q")
    for row in range(most):
        for level in levels:
            numbers.extend(level[row] if row < len(level) else (0, 0))
    return Numbers(numbers, (most, len(levels), 2))
