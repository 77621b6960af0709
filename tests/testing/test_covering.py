"""Covering arrays contain every pair of values, in far fewer rows than the product."""

from __future__ import annotations

import itertools

import pytest
from covering import covering_array, pairwise
from hypothesis import given, settings
from hypothesis import strategies as st


@settings(max_examples=60)
@given(st.lists(st.integers(1, 6), min_size=2, max_size=6), st.integers(0, 5))
def test_every_pair_of_values_shares_a_row(sizes: list[int], seed: int) -> None:
    factors = [[(i, value) for value in range(size)] for i, size in enumerate(sizes)]
    rows = covering_array(factors, seed)
    for one, other in itertools.combinations(range(len(sizes)), 2):
        assert {(row[one], row[other]) for row in rows} == set(
            itertools.product(factors[one], factors[other])
        )
    assert all(row[i] in factors[i] for row in rows for i in range(len(sizes)))
    assert len(set(rows)) == len(rows)
    assert rows == covering_array(factors, seed), "the same seed gives the same rows"


def test_the_array_is_near_the_lower_bound() -> None:
    """The two largest factors alone need 32 * 9 rows; the product has 1152."""
    assert len(covering_array([range(32), range(2), range(9), range(2)])) <= 1.1 * 32 * 9
    assert len(covering_array([[False, True]] * 18)) <= 16


def test_other_combinations_are_marked_full() -> None:
    mark = pairwise(number=range(4), letter="abc", flag=[False, True])
    names, cases = mark.args
    assert names == ("number", "letter", "flag") and len(cases) == 24
    selected = {case.values for case in cases if not case.marks}
    assert selected == set(covering_array([range(4), "abc", [False, True]]))
    assert {case.marks[0].name for case in cases if case.marks} == {"full"}
    assert len({case.id for case in cases}) == 24


def test_the_default_run_leaves_full_out(pytestconfig: pytest.Config) -> None:
    assert "not full" in " ".join(pytestconfig.getini("addopts"))
    assert any(line.startswith("full:") for line in pytestconfig.getini("markers"))
