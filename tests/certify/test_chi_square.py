"""The chi-square test of two samples: p-values, false alarm rate and power."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from outrider.certify.chi_square import (
    MIN_COUNT,
    NO_TEST,
    POWER,
    combine,
    compare,
    minimum_detectable,
    pool_cells,
)

P = np.array([0.3, 0.2, 0.15, 0.1, 0.08, 0.07, 0.05, 0.03, 0.02])


def sample(rng: np.random.Generator, p: np.ndarray, count: int) -> Counter[int]:
    return Counter({i: int(n) for i, n in enumerate(rng.multinomial(count, p))})


def test_p_values_are_those_of_scipy() -> None:
    """Statistic and p of a table without pooled cells, and of its tests combined."""
    first, second = Counter({1: 60, 2: 40}), Counter({1: 40, 2: 60})
    result = compare(first, second, 0.01)
    assert result.statistic == pytest.approx(8.0) and result.p == pytest.approx(0.004678, rel=1e-3)
    assert result.degrees_of_freedom == 1 and result.distance == pytest.approx(0.2)
    assert combine([result] * 2, 100, 100, 0.01).p == pytest.approx(3.355e-4, rel=1e-3)


def test_cells_have_enough_samples_and_lose_none() -> None:
    one, two = Counter({(1, 2): 50, (7,): 3, (7, 1): 4}), Counter({(1, 2): 40, (7,): 9, (7, 1): 8, (9, 9): 5})
    cells = pool_cells(one, two)
    assert cells == [(50, 40), (7, 22)], (
        "what is rare is joined with its neighbours, the last with the one before"
    )
    assert pool_cells(Counter({1: 2}), Counter({2: 3})) == [(2, 3)]
    rng = np.random.default_rng(0)
    flat = [sample(rng, np.full(400, 1 / 400), 500) for _ in range(2)]
    cells = pool_cells(*flat)
    assert (
        all(a + b >= MIN_COUNT for a, b in cells) and sum(a + b for a, b in cells) == 1000 and len(cells) > 30
    )


def test_false_alarms_are_as_rare_as_stated() -> None:
    """p < 0.1 in a tenth of 500 trials, for samples of one distribution: equal, unequal, peaked or pooled."""
    rng = np.random.default_rng(1)
    rare = np.concatenate([[0.4, 0.3], np.full(300, 0.001)])
    for p, sizes in ((P, (500, 500)), (P, (900, 300)), (rare, (400, 400))):
        chances = [compare(*(sample(rng, p, size) for size in sizes), level=0.01) for _ in range(500)]
        assert 0.06 < np.mean([chance.p < 0.1 for chance in chances]) < 0.14
        assert np.mean([chance.p < 0.001 for chance in chances]) < 0.009
        assert np.mean([chance.distance - chance.expected_distance for chance in chances]) == pytest.approx(
            0, abs=0.01
        )


def test_minimum_detectable_distances_are_detected() -> None:
    """Distributions at the distance `minimum_detectable` are detected at least as often as it promises.

    The worst case is a distance that one outcome takes from all others.
    """
    rng, size, level = np.random.default_rng(2), 1000, 0.001
    far = minimum_detectable(size, size, len(P) - 1, level)
    assert 0.08 < far < 0.2
    for side in (np.sign(np.arange(9) % 2 - 0.5) * P, np.eye(9)[0] - P):
        other = P + side / np.abs(side).sum() * 2 * far
        other = np.clip(other, 0, None) / np.clip(other, 0, None).sum()
        assert np.abs(other - P).sum() / 2 > 0.9 * far
        seen = [compare(sample(rng, P, size), sample(rng, other, size), level).p < level for _ in range(200)]
        assert np.mean(seen) > POWER - 0.06
    assert (
        minimum_detectable(4000, 4000, 8, level) == pytest.approx(far / 2, rel=0.01)
        and minimum_detectable(5, 5, 8, level) == 1
    )


def test_the_pooled_test_detects_many_small_deviations() -> None:
    rng, level = np.random.default_rng(3), 0.001
    other = P + 0.06 * np.array([1, -1, 0, 0, 0, 0, 0, 0, 0])
    each = [compare(sample(rng, P, 600), sample(rng, other, 600), level) for _ in range(12)]
    whole = combine(each, 600, 600, level)
    assert whole.p < 1e-5 < level < np.median([chance.p for chance in each])
    assert (
        whole.minimum_detectable < each[0].minimum_detectable / 1.5
        and 12 * 7 < whole.degrees_of_freedom <= 12 * 8
    )
    same = combine(
        [compare(sample(rng, P, 600), sample(rng, P, 600), level) for _ in range(12)], 600, 600, level
    )
    assert same.p > level and combine([NO_TEST] * 3, 10, 10, level) == NO_TEST


def test_single_outcome_gives_no_test() -> None:
    assert compare(Counter({1: 100}), Counter({1: 100}), 0.01) == NO_TEST
