"""Progress of a drafter that reads tokens, over shared pages that it has not filled, against the pool."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from outrider.cache.catch_up import TokenCatchUp
from outrider.cache.pages import Cache
from outrider.core.block_table import PAGE
from outrider.testing import make_row

PAGES = 12


class Rows(RuleBasedStateMachine):
    """Requests with common beginnings; the drafter reads now and then.

    pool: slot -> the tokens up to its position, as the drafter has read them.
    """

    def __init__(self) -> None:
        super().__init__()
        self.cache, self.catch_up = Cache(PAGES, PAGES * PAGE), TokenCatchUp()
        self.pool: dict[int, tuple[int, ...]] = {}
        self.rows: list[Any] = []

    @rule(blocks=st.lists(st.integers(0, 1), min_size=1, max_size=4), more=st.integers(1, PAGE - 1))
    def admit(self, blocks: list[int], more: int) -> None:
        row = make_row([block for block in blocks for _ in range(PAGE)] + [2] * more, id=str(len(self.rows)))
        row.table = self.cache.open()
        row.computed = self.cache.match(row.table, row.tokens, len(row.tokens) - 1)
        if not self.cache.reserve(row.table, len(row.tokens) + 2 * PAGE):
            self.cache.close(row.table)
            return
        self.catch_up.cursor(row, row.computed)
        self.rows.append(row)

    @precondition(lambda self: self.rows)
    @rule(which=st.integers(0, 99), count=st.integers(1, 2 * PAGE), reads=st.booleans())
    def compute(self, which: int, count: int, reads: bool) -> None:
        """The target computes some tokens; the drafter may read all that it has not."""
        row = self.rows[which % len(self.rows)]
        end = min(row.computed + count, len(row.tokens))
        cursor = self.catch_up.cursor(row, row.computed)
        if reads:
            for position in range(min(cursor.filled, row.computed), end):
                self.pool[row.table.slots[position]] = tuple(row.tokens[: position + 1])
            cursor.filled = end
        row.computed = end
        self.cache.register(row.table, row.tokens, self.catch_up.share(row))

    @precondition(lambda self: self.rows)
    @rule(which=st.integers(0, 99))
    def fork(self, which: int) -> None:
        source = self.rows[which % len(self.rows)]
        row = make_row(list(source.tokens), id=source.id + "f", source=source)
        row.table, row.computed = self.cache.open(), min(len(row.tokens) - 1, self.catch_up.share(source))
        fits = self.cache.fork(source.table, row.table, row.computed)
        if not fits or not self.cache.reserve(row.table, len(row.tokens)):
            self.cache.close(row.table)
            return
        for position in range(row.computed - row.computed % PAGE, row.computed):
            copied = self.pool.get(source.table.slots[position])
            if copied is not None:
                self.pool[row.table.slots[position]] = copied
        self.catch_up.cursor(row, row.computed)
        self.rows.append(row)

    @precondition(lambda self: self.rows)
    @rule(which=st.integers(0, 99))
    def end(self, which: int) -> None:
        row = self.rows.pop(which % len(self.rows))
        self.catch_up.forget(row)
        self.cache.close(row.table)

    @invariant()
    def filled_positions_hold_their_tokens(self) -> None:
        for row in self.rows:
            for position in range(self.catch_up.cursors[row].filled):
                assert self.pool.get(row.table.slots[position]) == tuple(row.tokens[: position + 1])


Rows.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestRows = Rows.TestCase


def test_a_row_that_begins_within_an_unfilled_page_catches_up_with_it() -> None:
    """As behind a head that needs the states of the tokens before."""
    cache, catch_up = Cache(8, 8 * PAGE), TokenCatchUp()
    row = make_row([1] * (2 * PAGE + 1))
    row.table = cache.open()
    assert cache.reserve(row.table, len(row.tokens))
    catch_up.unfilled.add(row.table.pages[1])
    assert catch_up.cursor(row, 2 * PAGE - 1).filled == PAGE


def test_a_page_that_was_filled_later_is_shared_as_filled() -> None:
    cache, catch_up = Cache(8, 8 * PAGE), TokenCatchUp()

    def admit(name: str) -> Any:
        row = make_row([1] * (2 * PAGE + 1), id=name)
        row.table = cache.open()
        row.computed = cache.match(row.table, row.tokens, len(row.tokens) - 1)
        assert cache.reserve(row.table, len(row.tokens))
        return row

    first = admit("a")
    cursor = catch_up.cursor(first, 0)
    first.computed = 2 * PAGE
    cache.register(first.table, first.tokens, catch_up.share(first))
    second = admit("b")
    assert second.computed == 2 * PAGE and catch_up.cursor(second, second.computed).filled == 0
    cursor.filled = 2 * PAGE
    catch_up.share(first)
    third = admit("c")
    assert catch_up.cursor(third, third.computed).filled == 2 * PAGE


@pytest.mark.parametrize("seed", range(3))
def test_random_rows_never_claim_what_was_not_read(seed: int) -> None:
    """Longer runs than the state machine's, without shrinking."""
    rows, rng = Rows(), random.Random(seed)
    for _ in range(400):
        which, draw = rng.randrange(100), rng.random()
        if draw < 0.3 or not rows.rows:
            rows.admit([rng.randrange(2) for _ in range(rng.randint(1, 4))], rng.randint(1, PAGE - 1))
        elif draw < 0.7:
            rows.compute(which, rng.randint(1, 2 * PAGE), rng.random() < 0.5)
        elif draw < 0.8:
            rows.fork(which)
        else:
            rows.end(which)
        rows.filled_positions_hold_their_tokens()
