"""Snapshots of recurrent states beside pages, against a model that knows what every state slot must hold.

The state after some tokens is modelled as the tuple of these tokens, after the root of the sequence.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from outrider.cache.pages import Cache
from outrider.cache.snapshots import Snapshots
from outrider.core.block_table import NO_STATE, PAGE, ROOT, BlockTable

STATES, SNAPSHOTS = 4, 3
PAGES = ([1] * PAGE, [2] * PAGE, [1] * (PAGE - 1) + [2])
texts = st.builds(
    lambda pages, tail: [t for i in pages for t in PAGES[i]] + tail,
    st.lists(st.integers(0, 2), max_size=4),
    st.lists(st.integers(1, 2), min_size=1, max_size=PAGE),
)
pick = st.integers(0, 1000)
borders = st.lists(st.integers(1, 6), max_size=3, unique=True)


def make_cache(pages: int = 14, lag: int = 0, snapshots: int = SNAPSHOTS) -> Cache:
    own = Snapshots(range(STATES, STATES + snapshots), lag)
    return Cache(pages, 14 * PAGE, states=STATES, snapshots=own)


@dataclass(eq=False)
class Text:
    """A sequence, the first `done` tokens of which are computed."""

    table: BlockTable
    tokens: list[int]
    done: int

    def state(self, length: int) -> tuple[Any, ...]:
        return (self.table.root, *self.tokens[:length])


class Machine(RuleBasedStateMachine):
    lag = 0

    def __init__(self) -> None:
        super().__init__()
        self.cache = make_cache(lag=self.lag)
        self.content: dict[int, Any] = {}  # state slot -> what it is after
        self.live: list[Text] = []

    def compute(self, text: Text, length: int, wanted: list[int], decodes: bool) -> None:
        """As a step does: snapshots at some of the borders that it passes, then the state of the row."""
        for page in sorted(wanted):
            if text.done < page * PAGE - self.lag <= length:
                slot = self.cache.snapshots.add(text.table, page * PAGE, decodes)
                if slot != NO_STATE:
                    self.content[slot] = text.state(page * PAGE - self.lag)
        text.done = length
        self.content[text.table.state] = text.state(length)

    @precondition(lambda self: len(self.live) < STATES)
    @rule(tokens=texts, root=st.sampled_from([ROOT, (None, "salt")]), share=st.floats(0, 1), wanted=borders)
    def start(self, tokens: list[int], root: Any, share: float, wanted: list[int]) -> None:
        table = self.cache.open(root)
        matched = self.cache.match(table, tokens, len(tokens) - 1)
        text = Text(table, tokens, max(0, matched - self.lag))
        if matched:
            assert table.length == text.done, "the state is that after other tokens"
            assert self.content[table.resumed] == text.state(text.done), "a snapshot of another text"
        assert (table.resumed == NO_STATE) == (not matched)
        if not self.cache.reserve(table, len(tokens)):
            self.cache.close(table)
            return
        self.cache.use_snapshot(table)
        self.compute(text, text.done + 1 + int((len(tokens) - text.done - 1) * share), wanted, False)
        self.live.append(text)

    @precondition(lambda self: self.live)
    @rule(which=pick, new=st.lists(st.integers(1, 2), max_size=PAGE), wanted=borders, decodes=st.booleans())
    def step(self, which: int, new: list[int], wanted: list[int], decodes: bool) -> None:
        text = self.live[which % len(self.live)]
        if self.cache.reserve(text.table, len(text.tokens) + len(new)):
            text.tokens = text.tokens + new
            self.compute(text, len(text.tokens), wanted, decodes)

    @precondition(lambda self: self.live)
    @rule(which=pick, share=st.floats(0, 1))
    def register(self, which: int, share: float) -> None:
        text = self.live[which % len(self.live)]
        self.cache.register(text.table, text.tokens, int(text.done * share))

    @precondition(lambda self: self.live)
    @rule(which=pick, share=st.booleans())
    def close(self, which: int, share: bool) -> None:
        text = self.live.pop(which % len(self.live))
        if share:
            self.cache.register(text.table, text.tokens, text.done)
        self.cache.close(text.table)

    @rule()
    def forget(self) -> None:
        self.cache.forget()

    @invariant()
    def books_are_right(self) -> None:
        self.cache.check()

    @invariant()
    def every_state_is_that_of_its_text(self) -> None:
        for text in self.live:
            assert self.content[text.table.state] == text.state(text.done)
            for border, slot in text.table.pending.items():
                assert self.content[slot] == text.state(border - self.lag)


class LaggingMachine(Machine):
    lag = 3


for machine in (Machine, LaggingMachine):
    machine.TestCase.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)
TestSnapshots, TestLaggingSnapshots = Machine.TestCase, LaggingMachine.TestCase


def filled(cache: Cache, tokens: list[int], *pages: int, decodes: bool = False) -> BlockTable:
    """A table with its pages in the index, and snapshots after some of them."""
    table = cache.open()
    cache.match(table, tokens, len(tokens) - 1)
    assert cache.reserve(table, len(tokens))
    for page in pages:
        assert cache.snapshots.add(table, page * PAGE, decodes) != NO_STATE
    cache.register(table, tokens, len(tokens))
    return table


def found(cache: Cache, tokens: list[int]) -> int:
    table = cache.open()
    length = cache.match(table, tokens, len(tokens) - 1)
    cache.use_snapshot(table)
    cache.close(table)
    cache.check()
    return length


def test_a_prefix_ends_with_the_last_snapshot() -> None:
    cache, tokens = make_cache(), [1] * (4 * PAGE + 1)
    cache.close(filled(cache, tokens, 1, 3))
    assert found(cache, tokens) == 3 * PAGE
    assert found(cache, tokens[: 3 * PAGE]) == PAGE
    assert found(cache, tokens[:PAGE]) == 0


def test_a_text_that_leaves_the_index_behind_its_snapshot_has_a_branch() -> None:
    cache, tokens = make_cache(), [1] * (4 * PAGE + 1)
    cache.close(filled(cache, tokens, 1))
    table = cache.open()
    assert cache.match(table, [*tokens[: 3 * PAGE], *[2] * PAGE], 4 * PAGE - 1) == PAGE
    assert table.branch == 3 * PAGE


def test_without_snapshots_nothing_is_shared() -> None:
    cache, tokens = make_cache(snapshots=0), [1] * (2 * PAGE + 1)
    assert not cache.prefix_caching
    cache.close(filled(cache, tokens))
    assert found(cache, tokens) == 0 and len(cache.free) == cache.pages


def test_the_least_recently_used_snapshot_is_evicted() -> None:
    cache, each = make_cache(), [[i] * (PAGE + 1) for i in range(4)]
    for tokens in each[:3]:
        cache.close(filled(cache, tokens, 1))
    assert found(cache, each[0]) == PAGE
    cache.close(filled(cache, each[3], 1))
    assert [found(cache, tokens) for tokens in each] == [PAGE, 0, PAGE, PAGE]


def test_an_evicted_page_frees_its_snapshot() -> None:
    cache = make_cache(pages=3)
    cache.close(filled(cache, [1] * PAGE, 1))
    assert len(cache.snapshots.free) == SNAPSHOTS - 1
    assert cache.reserve(cache.open(), 3 * PAGE)
    assert len(cache.snapshots.free) == SNAPSHOTS
    cache.check()


def test_a_decoding_table_replaces_its_last_snapshot() -> None:
    cache, tokens = make_cache(), [1] * (4 * PAGE + 1)
    table = filled(cache, tokens, 1)
    for page in (2, 3):
        cache.snapshots.add(table, page * PAGE, True)
        cache.attach(table, tokens)
        assert len(cache.snapshots.free) == 1
    assert found(cache, tokens) == 3 * PAGE
    cache.snapshots.add(table, 4 * PAGE, True)  # the one before is used by another text now
    assert not cache.snapshots.free


def test_a_match_without_admission_uses_no_snapshot() -> None:
    """As of a request that waits for pages: a decoding table goes on to replace its snapshot."""
    cache, tokens = make_cache(), [1] * (4 * PAGE + 1)
    table, waiting = filled(cache, tokens, 1, 2, decodes=True), cache.open()
    oldest = list(cache.snapshots.of_page)
    assert cache.match(waiting, tokens, len(tokens) - 1) == 2 * PAGE
    assert not cache.reserve(waiting, 100 * PAGE)
    cache.close(waiting)
    assert list(cache.snapshots.of_page) == oldest
    for page in (3, 4):
        cache.snapshots.add(table, page * PAGE, True)
        cache.attach(table, tokens)
        assert len(cache.snapshots.of_page) == 1
    cache.check()


def test_pending_snapshots_are_not_evicted() -> None:
    cache = make_cache()
    table = cache.open()
    for page in range(SNAPSHOTS):
        assert cache.snapshots.add(table, (page + 1) * PAGE, False) != NO_STATE
    assert cache.snapshots.add(cache.open(), PAGE, False) == NO_STATE
    cache.close(table)
    cache.check()
    assert len(cache.snapshots.free) == SNAPSHOTS


@pytest.mark.parametrize("damage", ["lose", "twice", "page", "closed"])
def test_check_sees_damage(damage: str) -> None:
    cache = make_cache()
    table = filled(cache, [1] * (2 * PAGE), 1, decodes=True)
    cache.check()
    match damage:
        case "lose":
            cache.snapshots.free.pop()
        case "twice":
            cache.snapshots.free.append(next(iter(cache.snapshots.of_page.values())))
        case "page":
            cache.snapshots.of_page[99] = cache.snapshots.free.pop()
        case "closed":
            cache.snapshots.replaceable[cache.snapshots.slots[0]] = BlockTable(table.slots)
    with pytest.raises(AssertionError):
        cache.check()
