"""Pages and prefix reuse against a model that knows what every slot must hold.

K/V of a position is a function of all tokens up to it, so a slot is modelled as the tuple of these tokens,
after the root of the sequence.  A page that is reused for other tokens or another root, or overwritten while
a sequence holds it, shows as a wrong tuple.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from scheduled import FakePool

from outrider.cache.pages import Cache
from outrider.core.block_table import PAGE, ROOT, BlockTable


@dataclass(eq=False)
class Sequence:
    table: BlockTable
    tokens: list[int]

    def content(self, position: int) -> tuple[Any, ...]:
        return (self.table.root, *self.tokens[: position + 1])


# Few different pages, so that prefixes are often shared and often differ in one token only.
PAGES = ([1] * PAGE, [2] * PAGE, [1] * (PAGE - 1) + [2])
texts = st.builds(
    lambda pages, tail: [t for i in pages for t in PAGES[i]] + tail,
    st.lists(st.integers(0, 2), max_size=3),
    st.lists(st.integers(1, 2), min_size=1, max_size=PAGE),
)
pick = st.integers(0, 1000)
roots = st.sampled_from([ROOT, (1, None), (None, "salt"), (1, "salt")])


class Slots(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.cache, self.pool = Cache(12, 12 * PAGE), FakePool()
        self.cache.pools = [self.pool]  # type: ignore[list-item]
        self.live: list[Sequence] = []

    def write(self, sequence: Sequence, start: int) -> None:
        for p in range(start, len(sequence.tokens)):
            self.pool.content[int(sequence.table.slots[p])] = sequence.content(p)

    def one(self, which: int) -> Sequence | None:
        return self.live[which % len(self.live)] if self.live else None

    @rule(tokens=texts, root=roots)
    def start(self, tokens: list[int], root: Any) -> None:
        """As admission does: open, match, reserve, compute the rest."""
        sequence = Sequence(self.cache.open(root), tokens)
        matched = self.cache.match(sequence.table, tokens, len(tokens) - 1)
        assert matched % PAGE == 0 and matched < len(tokens)
        for p in range(matched):
            assert self.pool.content[int(sequence.table.slots[p])] == sequence.content(p), (
                "match returned another text's page"
            )
        if not self.cache.reserve(sequence.table, len(tokens)):
            self.cache.close(sequence.table)
            return
        self.write(sequence, matched)
        self.live.append(sequence)

    @rule(which=pick, tokens=st.lists(st.integers(1, 2), min_size=1, max_size=PAGE + 3))
    def extend(self, which: int, tokens: list[int]) -> None:
        if (sequence := self.one(which)) is None:
            return
        before, available = list(sequence.table.pages), self.cache.available
        need = -(-(len(sequence.tokens) + len(tokens)) // PAGE) - len(before)
        if self.cache.reserve(sequence.table, len(sequence.tokens) + len(tokens)):
            sequence.tokens = sequence.tokens + tokens
            self.write(sequence, len(sequence.tokens) - len(tokens))
        else:
            assert need > available, "a reservation that would have fitted was refused"
            assert (sequence.table.pages, self.cache.available) == (before, available), (
                "a refused reservation took something"
            )

    @rule(which=pick, nodes=st.integers(1, 2 * PAGE))
    def draft_token(self, which: int, nodes: int) -> None:
        """Draft nodes take slots after the last token; the pages taken for them are freed."""
        if (sequence := self.one(which)) is None or not self.cache.reserve(
            sequence.table, len(sequence.tokens) + nodes
        ):
            return
        for p in range(len(sequence.tokens), len(sequence.tokens) + nodes):
            self.pool.content[int(sequence.table.slots[p])] = "draft_token"
        self.cache.shrink(sequence.table, len(sequence.tokens))
        assert sequence.table.room - len(sequence.tokens) < PAGE

    @rule(which=pick, share=st.floats(0, 1))
    def register(self, which: int, share: float) -> None:
        if sequence := self.one(which):
            self.cache.register(sequence.table, sequence.tokens, int(len(sequence.tokens) * share))

    @rule(which=pick, share=st.floats(0, 1), tokens=st.lists(st.integers(1, 2), min_size=1, max_size=3))
    def fork(self, which: int, share: float, tokens: list[int]) -> None:
        if (source := self.one(which)) is None:
            return
        length = int(len(source.tokens) * share)
        sequence = Sequence(self.cache.open(source.table.root), source.tokens[:length] + tokens)
        if self.cache.fork(source.table, sequence.table, length) and self.cache.reserve(
            sequence.table, len(sequence.tokens)
        ):
            self.write(sequence, length)
            self.live.append(sequence)
        else:
            self.cache.close(sequence.table)

    @rule(which=pick)
    def close(self, which: int) -> None:
        if sequence := self.one(which):
            self.live.remove(sequence)
            self.cache.close(sequence.table)

    @rule()
    def forget(self) -> None:
        self.cache.forget()

    @invariant()
    def books_are_right(self) -> None:
        self.cache.check()

    @invariant()
    def every_slot_holds_its_text(self) -> None:
        for sequence in self.live:
            for p in range(len(sequence.tokens)):
                assert self.pool.content[int(sequence.table.slots[p])] == sequence.content(p)


Slots.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestSlots = Slots.TestCase


def filled(cache: Cache, tokens: list[int]) -> BlockTable:
    table = cache.open()
    cache.match(table, tokens, len(tokens) - 1)
    assert cache.reserve(table, len(tokens))
    cache.register(table, tokens, len(tokens))
    return table


def test_a_closed_prefix_is_found_again() -> None:
    cache = Cache(8, 8 * PAGE)
    tokens = list(range(3 * PAGE + 5))
    first = filled(cache, tokens)
    pages = list(first.pages)
    cache.close(first)
    again = cache.open()
    assert cache.match(again, tokens, len(tokens) - 1) == 3 * PAGE
    assert again.pages == pages[:3]
    cache.check()


def test_match_leaves_one_token_to_compute() -> None:
    """The last token must be computed even if its page is cached: its logits are needed."""
    cache = Cache(8, 8 * PAGE)
    tokens = list(range(2 * PAGE))
    cache.close(filled(cache, tokens))
    assert cache.match(cache.open(), tokens, len(tokens) - 1) == PAGE


def test_only_pages_that_are_full_in_every_pool_are_entered() -> None:
    cache, tokens = Cache(8, 8 * PAGE), list(range(3 * PAGE))
    table = cache.open()
    assert cache.reserve(table, len(tokens))
    for filled, found in ((PAGE - 1, 0), (PAGE, PAGE), (2 * PAGE - 1, PAGE), (2 * PAGE, 2 * PAGE)):
        cache.register(table, tokens, filled)
        other = cache.open()
        assert cache.match(other, tokens, len(tokens) - 1) == found
        cache.close(other)


def test_the_same_page_after_another_prefix_is_not_reused() -> None:
    cache = Cache(8, 8 * PAGE)
    cache.close(filled(cache, [1] * PAGE + [2] * PAGE))
    assert cache.match(cache.open(), [3] * PAGE + [2] * PAGE + [0], 2 * PAGE) == 0
    assert cache.match(cache.open(), [2] * PAGE + [0], PAGE) == 0


def test_the_oldest_idle_page_is_evicted_first_and_prefixes_outlive_what_follows() -> None:
    cache = Cache(4, 8 * PAGE)
    old, new = [1] * PAGE + [1] * PAGE, [2] * PAGE + [2] * PAGE
    cache.close(filled(cache, old))
    cache.close(filled(cache, new))
    assert cache.reserve(cache.open(), PAGE)  # takes the end of the older text
    for tokens, left in ((old, PAGE), (new, 2 * PAGE)):
        table = cache.open()
        assert cache.match(table, [*tokens, 0], 2 * PAGE) == left
        cache.close(table)
    cache.check()


def test_a_page_has_one_key_though_the_page_before_it_was_evicted() -> None:
    """Samples that share pages index the second one behind different nodes of the same first page."""
    cache, tokens = Cache(4, 4 * PAGE), [1] * PAGE + [2] * PAGE
    cache.pools = [FakePool()]  # type: ignore[list-item]
    first, sample, twin, other = (cache.open() for _ in range(4))
    cache.reserve(first, PAGE)
    cache.register(first, tokens, PAGE)
    cache.reserve(sample, 2 * PAGE)
    assert cache.fork(sample, twin, 2 * PAGE)
    cache.register(sample, tokens, PAGE)  # which is the page of `first`
    cache.close(first)
    cache.reserve(other, 2 * PAGE)  # which evicts it
    for table in (sample, twin):
        cache.register(table, tokens, 2 * PAGE)
        cache.check()


def test_without_prefix_caching_nothing_is_kept() -> None:
    cache = Cache(4, 4 * PAGE, prefix_caching=False)
    cache.close(filled(cache, [1] * 2 * PAGE))
    assert len(cache.free) == 4
    assert cache.match(cache.open(), [1] * 2 * PAGE, 2 * PAGE) == 0


def test_fresh_pages_are_neighbours() -> None:
    """The allocator prefers consecutive pages: reading a sequence's keys is then one sweep."""
    cache = Cache(8, 8 * PAGE)
    table = cache.open()
    cache.reserve(table, 8 * PAGE)
    assert table.slots.tolist() == list(range(8 * PAGE))


@pytest.mark.parametrize("damage", ["lose", "twice", "owner", "index"])
def test_check_sees_damage(damage: str) -> None:
    """check() is what other tests rely on, so it has to fail where something is wrong."""
    cache = Cache(6, 6 * PAGE)
    table = filled(cache, [random.Random(0).randrange(5) for _ in range(2 * PAGE)])
    cache.check()
    match damage:
        case "lose":
            cache.free.pop()
        case "twice":
            cache.free.append(table.pages[0])
        case "owner":
            cache.owners[table.pages[0]] += 1
        case "index":
            cache.index.popitem()
    with pytest.raises((AssertionError, KeyError)):
        cache.check()
