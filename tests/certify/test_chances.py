"""The chi-square test of two lots: right p-values, false alarms as rare as it says, and as sharp as it says."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from outrider.certify.chances import EMPTY_TREE, LEAST, POWER, combined, compare, pooled, tail, visible

LAW = np.array([0.3, 0.2, 0.15, 0.1, 0.08, 0.07, 0.05, 0.03, 0.02])


def stream_id(random_streams: np.random.Generator, distribution: np.ndarray, count: int) -> Counter[int]:
    return Counter({i: int(n) for i, n in enumerate(random_streams.multinomial(count, distribution))})


@pytest.mark.parametrize(
    ("statistic", "freedom", "chance"),
    [(3.841, 1, 0.05), (18.307, 10, 0.05), (10.828, 1, 0.001), (149.449, 100, 0.001)],
)
def test_tails_are_those_of_the_tables(statistic: float, freedom: int, chance: float) -> None:
    assert tail(statistic, freedom) == pytest.approx(chance, rel=2e-3)


def test_cells_have_enough_samples_and_lose_none() -> None:
    one, two = Counter({(1, 2): 50, (7,): 3, (7, 1): 4}), Counter({(1, 2): 40, (7,): 9, (7, 1): 8, (9, 9): 5})
    cells = pooled(one, two)
    assert cells == [(50, 40), (7, 22)], (
        "what is rare is joined with its neighbours, the last with the one before"
    )
    assert pooled(Counter({1: 2}), Counter({2: 3})) == [(2, 3)]
    random_streams = np.random.default_rng(0)
    flat = [stream_id(random_streams, np.full(400, 1 / 400), 500) for _ in range(2)]
    cells = pooled(*flat)
    assert all(a + b >= LEAST for a, b in cells) and sum(a + b for a, b in cells) == 1000 and len(cells) > 30


def test_false_alarms_are_as_rare_as_stated() -> None:
    """Lots of one law, equal and unequal in size, peaked and nearly all pooled: p is below 0.1 in a tenth of 500 trials."""
    random_streams = np.random.default_rng(1)
    rare = np.concatenate([[0.4, 0.3], np.full(300, 0.001)])
    for distribution, sizes in ((LAW, (500, 500)), (LAW, (900, 300)), (rare, (400, 400))):
        chances = [
            compare(*(stream_id(random_streams, distribution, size) for size in sizes), level=0.01)
            for _ in range(500)
        ]
        assert 0.06 < np.mean([chance.p < 0.1 for chance in chances]) < 0.14
        assert np.mean([chance.p < 0.001 for chance in chances]) < 0.009
        assert np.mean([chance.distance - chance.by_chance for chance in chances]) == pytest.approx(
            0, abs=0.01
        )


def test_it_sees_what_it_says_it_sees() -> None:
    """Laws as far apart as `visible` says: seen at least so often.  A distance that one place takes from all others is the worst case."""
    random_streams, size, level = np.random.default_rng(2), 1000, 0.001
    far = visible(size, size, len(LAW) - 1, level)
    assert 0.08 < far < 0.2
    for side in (np.sign(np.arange(9) % 2 - 0.5) * LAW, np.eye(9)[0] - LAW):
        other = LAW + side / np.abs(side).sum() * 2 * far
        other = np.clip(other, 0, None) / np.clip(other, 0, None).sum()
        assert np.abs(other - LAW).sum() / 2 > 0.9 * far
        seen = [
            compare(stream_id(random_streams, LAW, size), stream_id(random_streams, other, size), level).p
            < level
            for _ in range(200)
        ]
        assert np.mean(seen) > POWER - 0.06
    assert visible(4000, 4000, 8, level) == pytest.approx(far / 2, rel=0.01) and visible(5, 5, 8, level) == 1


def test_all_as_one_sees_what_is_a_little_wrong_everywhere() -> None:
    random_streams, level = np.random.default_rng(3), 0.001
    other = LAW + 0.06 * np.array([1, -1, 0, 0, 0, 0, 0, 0, 0])
    each = [
        compare(stream_id(random_streams, LAW, 600), stream_id(random_streams, other, 600), level)
        for _ in range(12)
    ]
    whole = combined(each, 600, 600, level)
    assert whole.p < 1e-5 < level < np.median([chance.p for chance in each])
    assert whole.visible < each[0].visible / 1.5 and 12 * 7 < whole.freedom <= 12 * 8
    same = combined(
        [
            compare(stream_id(random_streams, LAW, 600), stream_id(random_streams, LAW, 600), level)
            for _ in range(12)
        ],
        600,
        600,
        level,
    )
    assert same.p > level and combined([EMPTY_TREE] * 3, 10, 10, level) == EMPTY_TREE


def test_one_outcome_says_nothing() -> None:
    assert compare(Counter({1: 100}), Counter({1: 100}), 0.01) == EMPTY_TREE
