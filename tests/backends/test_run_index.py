"""Where runs of tokens ended: what is found equals a search through the text, in C and in Python, and both
agree about everything.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.backends.cpu import backend as cpu
from outrider.backends.cpu.run_index import CompiledIndex
from outrider.backends.run_index import PLACES, RUNS, Index, Places, ReferenceIndex
from outrider.backends.select import run_index

Make = Callable[..., Index]

LIBRARY = cpu.library()
KINDS: list[Make] = [ReferenceIndex] if LIBRARY is None else [ReferenceIndex, partial(CompiledIndex, LIBRARY)]
needs_c = pytest.mark.skipif(LIBRARY is None, reason="no C compiler here")
both = pytest.mark.parametrize("make", KINDS, ids=["python", "c"][: len(KINDS)])

few = st.lists(st.integers(0, 3), max_size=60)
loops = st.builds(
    lambda loop, times: loop * times, st.lists(st.integers(0, 9), max_size=12), st.integers(1, 30)
)
texts = st.one_of(few, loops, st.lists(st.integers(-1, 1), max_size=60))
DEPTH = 5


def agreement(text: list[int], at: int, context: list[int]) -> int:
    length = 0
    while length < min(len(context), at + 1) and text[at - length] == context[-1 - length]:
        length += 1
    return length


def searched(
    text: list[int],
    context: list[int],
    order: int,
    longest: int,
    ends: range,
    loops: bool,
    depth: int = DEPTH,
) -> list[tuple[int, list[int]]]:
    """Going through the text, from its end to its beginning."""
    most, found = min(longest, RUNS[order - 1] - 1) if order else longest, []
    for at in reversed(ends):
        length = min(agreement(text, at, context), most)
        if length >= RUNS[order]:
            after = text[at + 1 :]
            known = (
                [after[i % len(after)] for i in range(depth)] if loops else [*after, *[-1] * depth][:depth]
            )
            cut = known.index(-1) if -1 in known else depth
            found.append((length, known[:cut] + [-1] * (depth - cut)))
    return found[: PLACES[order]]


def everything(places: Places) -> list[list[tuple[int, list[int]]]]:
    return [places.of(order) for order in range(len(RUNS))]


@both
@given(
    parts=st.lists(few, min_size=1, max_size=4),
    output=st.lists(st.integers(0, 3), max_size=12),
    longest=st.integers(1, 30),
)
def test_what_is_found_equals_a_search(
    make: Make, parts: list[list[int]], output: list[int], longest: int
) -> None:
    index, text = make(4096, longest, DEPTH), []
    for part in parts:
        text.extend(part)
        found = index.find(part, output, ())
        context = [*text, *output][-longest:]
        assert index.length == len(text)
        for order in range(len(RUNS)):
            assert found.of(order) == searched(text, context, order, longest, range(len(text) - 1), True)


@both
@given(older=few, newer=few, tokens=few, first=st.integers(0, 50), longest=st.integers(1, 30))
def test_other_texts_are_searched_the_last_one_first(
    make: Make, older: list[int], newer: list[int], tokens: list[int], first: int, longest: int
) -> None:
    """Also one whose beginning is forgotten."""
    held = [make(100), make(100)]
    for index, text in zip(held, (older, newer)):
        index.extend([*text, -1])
    held[0].first = first
    found = make(100, longest, DEPTH).find(tokens, (), held)
    for order in range(len(RUNS)):
        late, early = (
            searched([*text, -1], tokens[-longest:], order, longest, range(begin, len(text)), False)
            for text, begin in ((newer, 0), (older, first))
        )
        assert found.of(order) == [*late, *early][: PLACES[order]]


@both
@given(older=few, parts=st.lists(few, min_size=1, max_size=3), longest=st.integers(1, 30))
def test_the_longest_match_is_that_of_the_longest_runs(
    make: Make, older: list[int], parts: list[list[int]], longest: int
) -> None:
    other, mine, text = make(100), make(400, longest, DEPTH), []
    other.extend(older)
    for part in parts:
        text.extend(part)
        own = searched(text, text[-longest:], 0, longest, range(len(text) - 1), True)
        theirs = searched(older, text[-longest:], 0, longest, range(len(older) - 1), False)
        expected = max([length for length, _ in [*own, *theirs]], default=0)
        assert mine.longest_match(part, [mine, other]) == expected and mine.length == len(text)


@needs_c
@given(
    parts=st.lists(texts, max_size=4),
    own=loops,
    output=few,
    first=st.integers(0, 80),
    longest=st.integers(1, 40),
    depth=st.integers(1, 30),
)
def test_c_and_python_agree(
    parts: list[list[int]], own: list[int], output: list[int], first: int, longest: int, depth: int
) -> None:
    results = []
    for make in KINDS:
        old, mine = make(1500), make(400, longest, depth)
        for part in parts:
            old.extend(part)
        old.first = first
        results.append(
            [
                everything(mine.find(new, output, among))
                for new, among in ((own, ()), ((), [old]), ((), [old, old]))
            ]
        )
    assert results[0] == results[1]


def test_runs_that_share_a_hash_do_not_stand_for_each_other() -> None:
    """2,000 runs in 1,024 places: found places agree in spite of hash collisions, in C and Python."""
    rng = random.Random(0)
    text = [rng.randrange(500) for _ in range(2000)]
    indexes, missed = [make(2047, 9, 3) for make in KINDS], 0
    for end in range(1, len(text)):
        found = [everything(index.find(text[end - 1 : end], (), ())) for index in indexes]
        assert found[0] == found[-1]
        if end % 20 == 0:
            for order in (2, 3):
                expected = searched(
                    text[:end], text[max(0, end - 9) : end], order, 9, range(end - 1), True, 3
                )
                assert found[0][order] == expected[: len(found[0][order])]
                missed += len(expected) - len(found[0][order])
    assert missed < 30


@needs_c
@pytest.mark.parametrize("capacity", [1, 63, 64, 100, 4095, 4096, 20_000])
def test_the_memory_is_linear_in_the_text(capacity: int) -> None:
    """36 bytes a token, beside 64 places at least, also where all tokens are the same, the worst case of
    trees and automata.
    """
    index = CompiledIndex(LIBRARY, capacity)
    index.extend([7] * capacity)
    assert index.memory.nbytes <= 36 * max(capacity, 64)


@both
def test_no_text_outgrows_its_memory(make: Make) -> None:
    for grow in (lambda index: index.extend([1]), lambda index: index.find([1], (), ())):
        index = make(20)
        index.extend([1] * 20)
        with pytest.raises(AssertionError, match="21 tokens in an index of 20"):
            grow(index)


@both
def test_a_copy_is_of_its_own(make: Make) -> None:
    one = make(200, 8, 6)
    one.extend([1, 2, 3, 9] * 4)
    one.first = 5
    two = copy.deepcopy(one)
    assert everything(one.find([1, 2], (), ())) == everything(two.find([1, 2], (), ()))
    before = everything(two.find((), (), ()))
    one.extend([2, 2, 2])
    one.first = 19
    assert everything(two.find((), (), ())) == before and two.first == 5


def test_environment_variable_selects_the_reference_index(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTRIDER_KERNELS", "torch")
    assert isinstance(run_index(10), ReferenceIndex)
    monkeypatch.delenv("OUTRIDER_KERNELS")
    assert isinstance(run_index(10), ReferenceIndex if LIBRARY is None else CompiledIndex)
