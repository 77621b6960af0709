"""Covering arrays: few combinations of factor values in which every pair of values occurs."""

from __future__ import annotations

import itertools
import random
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import pytest

Named = tuple[str, Any]  # test id, value
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


def pairwise(**factors: Sequence[Any] | Mapping[str, Any]) -> pytest.MarkDecorator:
    """Parametrize a test over all combinations; those outside a covering array are marked `full`.

    A factor is a sequence of values, or a mapping of test id -> value.
    """
    named = [_named(values) for values in factors.values()]
    return _parametrized(tuple(factors), named, covering_array(named))


def parametrized(
    factors: Mapping[str, Sequence[Any]], selected: Collection[tuple[Any, ...]]
) -> pytest.MarkDecorator:
    """Parametrize a test over all combinations of `factors`; those not in `selected` are marked `full`."""
    rows = [tuple((_id(value), value) for value in row) for row in selected]
    return _parametrized(tuple(factors), [_named(values) for values in factors.values()], rows)


def _parametrized(
    names: tuple[str, ...], factors: Sequence[Sequence[Named]], selected: Collection[tuple[Any, ...]]
) -> pytest.MarkDecorator:
    cases = []
    for row in itertools.product(*factors):
        marks = () if row in selected else pytest.mark.full
        cases.append(
            pytest.param(*(value for _, value in row), marks=marks, id="-".join(id for id, _ in row))
        )
    return pytest.mark.parametrize(names, cases)


def _named(values: Sequence[Any] | Mapping[str, Any]) -> list[Named]:
    return [*values.items()] if isinstance(values, Mapping) else [(_id(value), value) for value in values]


def _id(value: Any) -> str:
    return str(getattr(value, "__name__", value)).replace(" ", "")
