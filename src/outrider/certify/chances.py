"""Whether two lots of samples may come from one law: a chi-square test over pooled cells, and what it would have seen."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from typing import NamedTuple, TypeVar

import torch

LEAST = 20  # samples of a cell, both lots together: ten are expected in each of two equal lots, enough for a chi-square
POWER = 0.9

Outcome = TypeVar("Outcome", bound=Hashable)
Cells = list[tuple[int, int]]  # how often each lot fell into each cell


class Chance(NamedTuple):
    """p: the chance that two lots of one law differ as much or more.  distance: half the sum of the differences of the cells' shares;
    by_chance: what this would be, on average, were the laws equal.  visible: where the laws of the cells are this far apart, the test
    says so with probability POWER at least; 1 means that it says nothing."""

    p: float
    statistic: float
    freedom: int
    distance: float
    by_chance: float
    visible: float


EMPTY_TREE = Chance(1.0, 0.0, 0, 0.0, 0.0, 1.0)


def pooled(one: Counter[Outcome], two: Counter[Outcome], least: int = LEAST) -> Cells:
    """Cells of enough samples.  Outcomes that are too rare are joined with their neighbours in order, so that texts with a common
    beginning stay together.  Only sums of both lots decide, which says nothing about their difference."""
    total = one + two
    cells = [(one[outcome], two[outcome]) for outcome in total if total[outcome] >= least]
    a = b = 0
    for outcome in sorted(outcome for outcome in total if total[outcome] < least):  # type: ignore[type-var]
        a, b = a + one[outcome], b + two[outcome]
        if a + b >= least:
            cells.append((a, b))
            a = b = 0
    if a + b:
        last = cells.pop() if cells else (0, 0)
        cells.append((last[0] + a, last[1] + b))
    return cells


def compare(one: Counter[Outcome], two: Counter[Outcome], level: float) -> Chance:
    """Pearson's test of homogeneity; `level` is the chance of a false alarm that `visible` is stated for."""
    cells = pooled(one, two)
    n, m = one.total(), two.total()
    freedom = len(cells) - 1
    if freedom < 1:
        return EMPTY_TREE
    statistic = sum((a * m - b * n) ** 2 / (a + b) for a, b in cells) / (n * m)
    distance = sum(abs(a / n - b / m) for a, b in cells) / 2
    noise = sum(math.sqrt(2 / math.pi * (a + b) / (n + m) * (1 / n + 1 / m)) for a, b in cells) / 2
    return Chance(
        tail(statistic, freedom), statistic, freedom, distance, noise, visible(n, m, freedom, level)
    )


def combined(chances: Sequence[Chance], n: int, m: int, level: float) -> Chance:
    """All tests as one, which sees what is a little wrong everywhere.  Every one had lots of n and m; distances are averages (`visible`
    of the root of the mean square)."""
    told = [chance for chance in chances if chance.freedom]
    if not told:
        return EMPTY_TREE
    statistic, freedom = sum(chance.statistic for chance in told), sum(chance.freedom for chance in told)
    distance, noise = (
        sum(values) / len(told) for values in ([c.distance for c in told], [c.by_chance for c in told])
    )
    sight = visible(n * len(told), m * len(told), freedom, level)
    return Chance(tail(statistic, freedom), statistic, freedom, distance, noise, sight)


def tail(statistic: float, freedom: int) -> float:
    """The chance that a chi-square variable of so many degrees of freedom exceeds the statistic."""
    half = torch.tensor([freedom / 2, statistic / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(half[0], half[1]))


def visible(n: int, m: int, freedom: int, level: float) -> float:
    """The distance between two laws of the pooled cells from which on lots of n and m samples show it with probability POWER, whatever
    its shape.  What moves inside a pooled cell is not seen.

    A distance D means a non-centrality of at least 4 D² nm / (n + m); the non-central law is taken as normal.
    """
    limit = _root(lambda x: level - tail(x, freedom))
    z = math.sqrt(2) * float(torch.special.erfinv(torch.tensor(2 * POWER - 1, dtype=torch.float64)))
    needed = _root(lambda x: freedom + x - z * math.sqrt(2 * (freedom + 2 * x)) - limit)
    return min(1.0, math.sqrt(needed * (n + m) / (n * m)) / 2)


def _root(rising: Callable[[float], float]) -> float:
    """Where a function that rises passes zero, in [0, 2^20]."""
    low, high = 0.0, 2.0**20
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (middle, high) if rising(middle) < 0 else (low, middle)
    return high
