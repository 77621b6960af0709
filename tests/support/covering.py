"""Covering arrays: few combinations of factor values in which every pair of values occurs."""

from __future__ import annotations

import itertools
import random
from collections.abc import Collection, Sequence
from typing import Any

import pytest

TRIES = 40  # random candidates for each new row


def covering_array(factors: Sequence[Sequence[Any]], seed: int = 0) -> list[tuple[Any, ...]]:
    """Rows with one value of each factor, such that any two values of different factors share a row.

    Greedy (Cohen et al. 1997, "The AETG system"): each row contains a pair that is still missing and, of some
    random candidates, covers the most missing pairs. The same seed gives the same rows.
    """
    rng = random.Random(seed)
    sizes = [len(values) for values in factors]
    columns = [*itertools.combinations(range(len(factors)), 2)]
    missing = {(i, a, j, b): None for i, j in columns for a in range(sizes[i]) for b in range(sizes[j])}
    rows: list[tuple[Any, ...]] = []

    def pairs(row: Sequence[int]) -> list[tuple[int, int, int, int]]:
        return [(i, row[i], j, row[j]) for i, j in columns]

    while missing:
        i, a, j, b = next(iter(missing))
        best: tuple[int, list[int]] = 0, []
        for _ in range(TRIES):
            row = [rng.randrange(size) for size in sizes]
            row[i], row[j] = a, b
            count = sum(pair in missing for pair in pairs(row))
            if count > best[0]:
                best = count, row
            if count == len(columns):
                break
        for pair in pairs(best[1]):
            missing.pop(pair, None)
        rows.append(tuple(values[at] for values, at in zip(factors, best[1])))
    return rows


def pairwise(**factors: Sequence[Any]) -> pytest.MarkDecorator:
    """Parametrize a test over all combinations; those outside a covering array are marked `full`."""
    values = [list(values) for values in factors.values()]
    return parametrized(factors, covering_array(values))


def parametrized(
    factors: dict[str, Sequence[Any]], selected: Collection[tuple[Any, ...]]
) -> pytest.MarkDecorator:
    """Parametrize a test over all combinations of `factors`; those not in `selected` are marked `full`."""
    cases = [
        pytest.param(*row, marks=() if row in selected else pytest.mark.full, id="-".join(map(_name, row)))
        for row in itertools.product(*factors.values())
    ]
    return pytest.mark.parametrize(tuple(factors), cases)


def _name(value: Any) -> str:
    return str(getattr(value, "__name__", value)).replace(" ", "")
