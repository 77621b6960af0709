"""Chi-square test of homogeneity of two samples, and its minimum detectable deviation."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Sequence
from functools import lru_cache
from typing import NamedTuple, TypeVar

from scipy.optimize import brentq
from scipy.stats import chi2, chi2_contingency, ncx2

MIN_COUNT = 20  # per cell, both samples together: ten are expected in each of two samples of equal size
POWER = 0.9
MAX_NONCENTRALITY = 2.0**20

Outcome = TypeVar("Outcome", bound=Hashable)


class ChiSquareResult(NamedTuple):
    """Result of one test.

    p: probability of a statistic at least this large if both distributions are equal.
    distance: total variation distance of the two samples over the cells.
    expected_distance: its approximate expectation if both distributions are equal.
    minimum_detectable: distance that the test detects with probability POWER or more; 1: it detects none.
    """

    p: float
    statistic: float
    degrees_of_freedom: int
    distance: float
    expected_distance: float
    minimum_detectable: float


NO_TEST = ChiSquareResult(1.0, 0.0, 0, 0.0, 0.0, 1.0)  # a single cell


def pool_cells(
    first: Counter[Outcome], second: Counter[Outcome], min_count: int = MIN_COUNT
) -> list[tuple[int, int]]:
    """Counts (first, second) in cells of at least `min_count` samples.

    Rare outcomes are merged with their neighbours in sort order, so that texts with a common beginning stay
    together. Cells depend on the sums of both samples only, not on their difference.
    """
    total = first + second
    cells = [(first[outcome], second[outcome]) for outcome in total if total[outcome] >= min_count]
    a = b = 0
    rare = [outcome for outcome in total if total[outcome] < min_count]
    for outcome in sorted(rare):  # type: ignore[type-var]
        a, b = a + first[outcome], b + second[outcome]
        if a + b >= min_count:
            cells.append((a, b))
            a = b = 0
    if a + b:
        last = cells.pop() if cells else (0, 0)
        cells.append((last[0] + a, last[1] + b))
    return cells


def compare(first: Counter[Outcome], second: Counter[Outcome], level: float) -> ChiSquareResult:
    """Pearson's test of homogeneity.  `level`: false alarm probability that minimum_detectable refers to."""
    cells = pool_cells(first, second)
    if len(cells) < 2:
        return NO_TEST
    n, m = first.total(), second.total()
    test = chi2_contingency(list(zip(*cells)), correction=False)
    distance = sum(abs(a / n - b / m) for a, b in cells) / 2
    expected = sum(math.sqrt(2 / math.pi * (a + b) / (n + m) * (1 / n + 1 / m)) for a, b in cells) / 2
    detectable = minimum_detectable(n, m, test.dof, level)
    p, statistic = float(test.pvalue), float(test.statistic)
    return ChiSquareResult(p, statistic, int(test.dof), distance, expected, detectable)


def combine(results: Sequence[ChiSquareResult], n: int, m: int, level: float) -> ChiSquareResult:
    """All tests as one, each of samples of n and m: it detects a small deviation that occurs in all of them.

    Distances are means; minimum_detectable is for the root of the mean square.
    """
    tested = [result for result in results if result.degrees_of_freedom]
    if not tested:
        return NO_TEST
    count = len(tested)
    statistic = sum(result.statistic for result in tested)
    dof = sum(result.degrees_of_freedom for result in tested)
    distance = sum(result.distance for result in tested) / count
    expected = sum(result.expected_distance for result in tested) / count
    detectable = minimum_detectable(n * count, m * count, dof, level)
    return ChiSquareResult(float(chi2.sf(statistic, dof)), statistic, dof, distance, expected, detectable)


@lru_cache(maxsize=1024)  # tests of one run share sizes and level
def minimum_detectable(n: int, m: int, degrees_of_freedom: int, level: float) -> float:
    """Total variation distance that samples of n and m detect with probability POWER; 1 if there is none.

    A distance D over the cells means a noncentrality of at least 4 D² nm / (n + m).  Deviations within a
    pooled cell are not detected.
    """
    critical = chi2.isf(level, degrees_of_freedom)

    def missing_power(noncentrality: float) -> float:
        return POWER - float(ncx2.sf(critical, degrees_of_freedom, noncentrality))

    needed = brentq(missing_power, 1e-9, MAX_NONCENTRALITY)
    return min(1.0, math.sqrt(needed * (n + m) / (n * m)) / 2)
