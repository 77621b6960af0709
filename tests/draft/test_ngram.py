"""Prompt lookup equals a search through the whole text, and says nothing where there is nothing to say."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider import ConfigError
from outrider.core.row import Row
from outrider.core.step import Batch, Commit, RowStep
from outrider.core.tree import Budget
from outrider.draft.ngram import Ngram, NgramIndex
from outrider.testing import drafted_batch, make_row, proposed_tree


def propose_tree(drafter: Ngram, row: Row, depth: int) -> list[int]:
    tree = drafter.propose(Batch([RowStep(row, 0, 1, budget=Budget(depth, depth))])).trees[0]
    assert tree.parents == list(range(-1, len(tree.tokens) - 1)), "a chain"
    assert all(0 < c < 1 for c in tree.confidence)
    return tree.tokens


def naive(tokens: list[int], low: int, high: int, depth: int) -> list[int]:
    """Longest suffix first, then the latest earlier place; the copy runs on into itself."""
    for n in range(high, low - 1, -1):
        for end in range(len(tokens) - 2, n - 2, -1):
            if n < len(tokens) and tokens[end + 1 - n : end + 1] == tokens[-n:]:
                copy = list(tokens)
                for i in range(depth):
                    copy.append(copy[end + 1 + i])
                return copy[len(tokens) :]
    return []


def drafter(low: int = 2, high: int = 4) -> Ngram:
    return Ngram(Ngram.Options(prompt_lookup_max=high, prompt_lookup_min=low))


def trust(method: Ngram, row: Row) -> None:
    """Raise the acceptance of this row, as if earlier drafts had been right."""
    method.indexes.setdefault(row, NgramIndex([-1] * (method.shortest - 1))).credit = 4


def test_the_longest_match_wins() -> None:
    """[2, 3] was last followed by 9, but [1, 2, 3] by 7."""
    assert propose_tree(drafter(), make_row([1, 2, 3, 7, 5, 2, 3, 9, 4, 1, 2, 3]), 1) == [7]


def test_of_equally_long_matches_the_most_recent_wins() -> None:
    method, row = drafter(), make_row([2, 3, 7, 8, 2, 3, 9, 9, 2, 3])
    trust(method, row)
    assert propose_tree(method, row, 2) == [9, 9]


@pytest.mark.parametrize("tokens", [[1], [1, 2], [1, 2, 3, 4, 5], [1, 2, 3, 1]])
def test_no_match_gives_no_draft(tokens: list[int]) -> None:
    assert propose_tree(drafter(), make_row(tokens), 5) == []


def test_a_copy_that_reaches_the_end_goes_on_as_the_loop_would() -> None:
    for method, tokens, expected in (
        (drafter(), [1, 2, 3, 1, 2, 3, 1, 2], [3, 1, 2, 3, 1, 2, 3]),
        (drafter(low=1), [5, 5], [5] * 4),
    ):
        row = make_row(tokens)
        trust(method, row)
        assert propose_tree(method, row, len(expected)) == expected


def test_no_budget_gives_no_draft() -> None:
    assert propose_tree(drafter(), make_row([1, 2, 1, 2]), 0) == []


@given(
    start=st.lists(st.integers(0, 3), min_size=1, max_size=30),
    grown=st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=5), max_size=6),
    low=st.integers(1, 3),
    more=st.integers(0, 3),
    depth=st.integers(1, 8),
)
def test_the_growing_index_equals_a_search(
    start: list[int], grown: list[list[int]], low: int, more: int, depth: int
) -> None:
    method, row = drafter(low, low + more), make_row(start)
    trust(method, row)
    for tokens in [[], *grown]:
        row.tokens.extend(tokens)
        assert propose_tree(method, row, depth) == naive(row.tokens, low, low + more, depth)


def test_rows_do_not_see_each_other_and_are_forgotten() -> None:
    method = drafter()
    a, b = make_row([1, 2, 4, 3, 1, 2, 4]), make_row([9, 1, 2, 4])
    assert propose_tree(method, a, 1) == [3]
    assert propose_tree(method, b, 1) == []
    method.forget(a, "preempted")
    assert propose_tree(method, a, 1) == [3], "a preempted row is indexed anew"
    for row in (a, b):
        method.forget(row, "finished")
    method.forget(a, "finished")  # unknown rows are no error
    assert not method.indexes


@pytest.mark.parametrize(("low", "high"), [(0, 4), (5, 4), (-1, -1)])
def test_wrong_ranges_are_refused_by_name(low: int, high: int) -> None:
    with pytest.raises(ConfigError, match="prompt_lookup_max" if high < 1 else "prompt_lookup_min"):
        Ngram.Options(prompt_lookup_max=high, prompt_lookup_min=low)


def test_evidence_decides_how_much_is_risked() -> None:
    """Draft length follows a row's success: short after failures, full after accepted drafts."""
    row = make_row([1, 2, 3, 4, 9, 9, 1, 2, 3, 4, 8, 1, 2, 3, 4])
    drafter = Ngram(Ngram.Options())

    def propose_tree(accepted: int) -> list[int]:
        batch = drafted_batch(drafter, row, Budget(5, 5))
        batch[0].accepted = list(range(accepted))
        drafter.observe(Commit(batch))
        return batch[0].tree.tokens

    assert propose_tree(0) == [8, 1, 2], "a match of four"
    assert propose_tree(0) == [8], "after a failure"
    assert propose_tree(1) == [8]
    assert propose_tree(2) == [8, 1, 2], "one success was one more chance"
    assert len(propose_tree(0)) == 5, "proven"
    for text, drafted in (
        ([5, 3, 4, 9, 9, 6, 3, 4], 0),
        ([5, 3, 4, 9, 9, 5, 3, 4], 2),
    ):  # a match of two, of three
        short = make_row(text)
        assert len(proposed_tree(drafter, short, Budget(5, 5)).tokens) == drafted
