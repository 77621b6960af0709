"""Lookahead decoding: the published mask, positions and updates, its pool, and where its window ends."""

from __future__ import annotations

from array import array
from pathlib import Path
from typing import Any

import pytest
from helpers import attended_slots
from hypothesis import given
from hypothesis import strategies as st

from outrider import LLM, ConfigError, SamplingParams
from outrider.core.step import Commit, RowStep
from outrider.core.step_input import StepInput
from outrider.core.tree import ROOT, Budget, DraftTree
from outrider.draft.lookahead import Lookahead, NgramPool, Window
from outrider.engine.runner import add_row
from outrider.testing import (
    accepted_path,
    check_idle,
    check_tree,
    drafted_batch,
    make_drafter,
    make_row,
    proposed_tree,
)

SHAPES = [(1, 2), (1, 4), (2, 3), (4, 2), (3, 5), (5, 4)]


def answer(text: tuple[int, ...]) -> int:
    """A target that looks at its last three tokens: it loops, so that n-grams come again."""
    return sum((i + 3) * token for i, token in enumerate(text[-3:])) % 13


def path_of(tree: DraftTree, node: int) -> tuple[int, ...]:
    return () if node == ROOT else (*path_of(tree, tree.parents[node]), tree.tokens[node])


def only_drafts(tree: DraftTree) -> DraftTree:
    return tree.only(range(tree.size))


class Steps:
    """A row that decodes greedily, and what its drafter proposes."""

    def __init__(self, drafter: Lookahead, tokens: list[int]) -> None:
        self.drafter, self.row = drafter, make_row(tokens)

    def propose(self, budget: Budget | None = None) -> DraftTree:
        depth = self.drafter.depth
        budget = budget or Budget(depth, self.drafter.size(depth))
        self.batch = drafted_batch(self.drafter, self.row, budget)
        tree = self.batch[0].tree
        check_tree(only_drafts(tree), budget)
        assert len(tree.tokens) <= budget.nodes
        return tree

    def observe(self, mute: int | None = None) -> int:
        """The target speaks after every node but `mute`.  Returns how many were accepted."""
        tree, before = self.batch[0].tree, tuple(self.row.tokens)
        step = self.batch[0]
        step.topk = [
            [answer((*before, *path_of(tree, node)))] if node != mute else []
            for node in range(-1, len(tree.tokens))
        ]
        text = list(before)
        for _ in range(9):
            text.append(answer(tuple(text)))
        step.accepted = accepted_path(only_drafts(tree), text[len(before) :])
        step.emitted = text[len(before) : len(before) + len(step.accepted) + 1]
        self.row.tokens.extend(step.emitted)
        self.drafter.observe(Commit(self.batch))
        return len(step.accepted)


# ---- the window


class Published:
    """The updates of the published code, with its arrays: past[0] lacks the current token, past[l] is None
    until filled.
    """

    def __init__(self, first: list[int], window: int, level: int, most: int) -> None:
        self.past: list[list[int] | None] = [list(first), *[None] * (level - 2)]
        self.window, self.level, self.most, self.pool = window, level, most, {}
        self.filled = 0

    def speak(self, text: tuple[int, ...]) -> list[int]:
        """The target's tokens after the last filled level; each node sees level 0 up to its column."""
        zero, rows = [text[-1], *self.past[0]], self.past[1 : self.filled + 1]
        return [answer((*text[:-1], *zero[: j + 1], *(row[j] for row in rows))) for j in range(len(zero))]

    def step(self, text: tuple[int, ...]) -> None:
        results = self.speak(text)
        if self.filled < self.level - 2:
            for depth in range(self.filled + 1):
                self.past[depth] = self.past[depth][1:]
            self.past[self.filled + 1] = results[1:]
            self.filled += 1
            return
        zero = [text[-1], *self.past[0]]
        for j in range(self.window):
            self.add(zero[j], (*(row[j] for row in self.past[1:]), results[j]))
        whole = [*self.past, results]
        self.past = [whole[1][1:], *whole[2:]]

    def add(self, token: int, rest: tuple[int, ...]) -> None:
        grams = self.pool.setdefault(token, [])
        if rest in grams:
            grams.remove(rest)
        grams.append(rest)
        del grams[: -self.most]


def known(drafter: Lookahead) -> dict[int, list[tuple[int, ...]]]:
    return {token: list(grams) for token, grams in drafter.memory.pool.grams.items()}


@pytest.mark.parametrize(("window", "level"), SHAPES)
def test_window_and_pool_move_as_published(window: int, level: int) -> None:
    drafter = make_drafter(
        Lookahead, window_size=window, level=level, guess_set_size=3, pool_from_prompt=False
    )
    steps = Steps(drafter, [3, 1, 4, 1, 5])
    steps.propose()
    first = list(drafter.rows[steps.row].window.levels[0])
    assert len(first) == window + level - 3 and set(first) <= {3, 1, 4, 5}
    other = Published(first, window, level, 3)
    accepted = 0
    for _ in range(40):
        text = tuple(steps.row.tokens)
        steps.propose()
        accepted += steps.observe()
        other.step(text)
        assert drafter.rows[steps.row].window.levels == [row for row in other.past if row is not None]
        assert known(drafter) == other.pool
    assert len(other.pool) > 1 and accepted > 0
    assert [len(row) for row in other.past] == [window - 1, *[window] * (level - 2)]


@pytest.mark.parametrize(("window", "level"), SHAPES)
def test_lookahead_visibility_equals_the_published_mask(window: int, level: int) -> None:
    """The plan's own keys and positions, and those that the C kernels walk, in every step of a window that
    grows and moves.
    """
    drafter = make_drafter(Lookahead, window_size=window, level=level)
    steps = Steps(drafter, [3, 1, 4, 1, 5])
    for _ in range(12):
        tree = steps.propose()
        row, end = steps.row, len(steps.row.tokens)
        levels = drafter.rows[row].window.levels
        table = array("i", [(7 * i + 3) % 211 for i in range(end + len(tree.tokens))])
        row.table = type("Table", (), {"slots": table})()
        step_input = StepInput()
        add_row(step_input, RowStep(row, end - 1, 1, tree=tree))
        step_input.build()
        at = end + tree.size  # in the table: level 0 without the root, then the other levels
        slot_of = {(0, 0): table[end - 1]}
        for depth, tokens in enumerate(levels):
            for j in range(len(tokens)):
                slot_of[depth, j + (depth == 0)] = table[at]
                at += 1
        assert at == len(table)
        assert len(slot_of) - 1 == tree.probes
        planned = 1 + tree.size
        for depth, j in list(slot_of)[1:]:
            sees = [slot_of[0, c] for c in range(j + 1)] + [
                slot_of[below, j] for below in range(1, depth + 1)
            ]
            assert attended_slots(step_input, table, planned) == [*table[: end - 1], *sees]
            assert step_input.positions[planned] == end - 1 + depth + j
            assert step_input.input_ids[planned] == levels[depth][j - (depth == 0)]
            planned += 1
        assert planned == step_input.length
        for node in range(tree.size):
            assert step_input.positions[1 + node] == end - 1 + len(path_of(tree, node))
        steps.observe()
    assert len(levels) == level - 1, "the last ones were whole"


def test_target_after_a_probe_equals_target_after_its_path(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the engine, against plain decoding of the tokens that a probe sees."""
    plain, llm = (
        LLM(str(tiny)),
        LLM(str(tiny), speculative_config={"method": "lookahead", "window_size": 3, "level": 4}),
    )
    observe, checked = llm.engine.drafter.observe, 0

    def checking(made: Commit) -> None:
        nonlocal checked
        step = made.batch[0]
        tree, row = step.tree, step.row
        for node in range(tree.size, len(tree.tokens)):
            seen = [*row.tokens[: step.end], *path_of(tree, node)]
            expected = (
                plain.generate({"prompt_token_ids": seen}, SamplingParams(temperature=0, max_tokens=1))[0]
                .outputs[0]
                .token_ids
            )
            assert step.topk[1 + node] == expected
            checked += 1
        observe(made)

    monkeypatch.setattr(llm.engine.drafter, "observe", checking)
    llm.generate(
        {"prompt_token_ids": [7, 8, 9, 7, 8]},
        SamplingParams(temperature=0.7, seed=1, max_tokens=10, ignore_eos=True),
    )
    assert checked > 50


# ---- the pool, and drafts from it


@given(st.lists(st.tuples(st.integers(0, 4), st.tuples(st.integers(0, 2), st.integers(0, 1))), max_size=60))
def test_the_pool_equals_a_list(adds: list[tuple[int, tuple[int, ...]]]) -> None:
    """Of the last n-grams, of the last tokens."""
    pool, naive = NgramPool(2, max_tokens=3), []
    for token, rest in adds:
        pool.add(token, rest)
        naive = [*((t, r) for t, r in naive if (t, r) != (token, rest)), (token, rest)]
        mine = [entry for entry in naive if entry[0] == token]
        if len(mine) > 2:
            naive.remove(mine[0])
        alive = list(dict.fromkeys(t for t, _ in reversed(naive)))[:3]
        naive = [entry for entry in naive if entry[0] in alive]
    for token in range(5):
        assert list(pool.after(token)) == [rest for t, rest in reversed(naive) if t == token]


def test_latest_ngrams_are_drafted_as_a_tree() -> None:
    drafter = make_drafter(Lookahead, window_size=1, level=4, guess_set_size=3)
    for rest in ((1, 2, 3), (4, 5, 6), (1, 2, 7), (1, 8, 9)):
        drafter.memory.pool.add(30, rest)
    tree = Steps(drafter, [30]).propose()
    assert [path_of(tree, node) for node in range(tree.size)] == [
        (1,),
        (1, 8),
        (1, 8, 9),
        (1, 2),
        (1, 2, 7),
        (4,),
        (4, 5),
        (4, 5, 6),
    ]
    short = Steps(drafter, [30]).propose(Budget(2, 3))
    assert [path_of(short, node) for node in range(short.size)] == [(1,), (1, 8), (1, 2)]


def test_the_end_of_a_text_is_no_failure() -> None:
    drafter, row = make_drafter(Lookahead, window_size=1, level=3), make_row([30])
    drafter.memory.pool.add(30, (1, 2))
    before, batch = [*drafter.memory.acceptance.values], drafted_batch(drafter, row, Budget(2, 9))
    batch[0].emitted, batch[0].closing, row.finish_reason = [1], [0], "length"
    drafter.observe(Commit(batch))
    assert drafter.memory.acceptance.values == before


def test_the_text_is_in_the_pool_where_asked() -> None:
    for asked in (True, False):
        drafter = make_drafter(Lookahead, window_size=2, level=3, guess_set_size=5, pool_from_prompt=asked)
        steps = Steps(drafter, [40, 41, 42, 43, 40])
        steps.propose()
        steps.observe()
        assert (list(drafter.memory.pool.after(40)) == [(41, 42)]) == asked
        steps.propose()
        steps.observe()
        text = steps.row.tokens
        assert ((text[5], text[6]) in drafter.memory.pool.after(40)) == asked, "and what the target emitted"


# ---- limits


@pytest.mark.parametrize(("window", "level"), SHAPES)
def test_no_window_is_larger_than_announced(window: int, level: int) -> None:
    drafter = make_drafter(Lookahead, window_size=window, level=level, guess_set_size=1)
    steps, sizes = Steps(drafter, [1, 2, 3]), []
    for _ in range(level + 2):
        tree = steps.propose()
        sizes.append(tree.probes)
        assert (
            max((len(path_of(tree, node)) for node in range(tree.size, len(tree.tokens))), default=0)
            == drafter.reach
        )
        steps.observe()
    assert max(sizes) == drafter.size(drafter.depth) - drafter.depth
    assert sizes[-1] == (level - 1) * window - 1
    assert drafter.size(0) == 0 and drafter.size(1) == max(sizes) + 1


def test_a_window_that_does_not_fit_is_left_out() -> None:
    drafter = make_drafter(Lookahead, window_size=3, level=3, pool_from_prompt=False)
    drafter.memory.pool.add(2, (5, 6))
    steps = Steps(drafter, [1, 2])
    steps.propose(Budget(2, 5))
    before = list(drafter.rows[steps.row].window.levels)
    assert (steps.batch[0].tree.size, steps.batch[0].tree.probes) == (2, 3)
    assert (steps.propose(Budget(2, 4)).size, steps.propose(Budget(2, 4)).probes) == (2, 0)
    steps.observe()
    assert drafter.rows[steps.row].window.levels == before, "nothing was emitted after it"


@pytest.mark.parametrize(("tokens", "probes"), [(9_997, 3), (9_998, 0), (9_999, 0)])
def test_no_probe_stands_past_the_last_position(tokens: int, probes: int) -> None:
    """Three tokens in a row from the root: the last of them at position 9,999 of 10,000."""
    drafter = make_drafter(Lookahead, window_size=3, level=3, pool_from_prompt=False)
    assert Steps(drafter, [1] * tokens).propose().probes == probes


def test_window_without_valid_token_restarts() -> None:
    drafter = make_drafter(Lookahead, window_size=3, level=3)
    steps = Steps(drafter, [1, 2, 3])
    for _ in range(4):
        steps.propose()
        steps.observe()
    tree = steps.propose()
    steps.observe(mute=len(tree.tokens) - 1)
    assert steps.row not in drafter.rows
    assert steps.propose().probes == 3


def test_forget_drops_the_window_of_a_row() -> None:
    drafter = make_drafter(Lookahead)
    steps = Steps(drafter, [1, 2, 3])
    steps.propose()
    assert drafter.rows
    drafter.forget(steps.row, "preempted")
    assert not drafter.rows
    steps.observe()
    assert not drafter.rows
    assert proposed_tree(drafter, steps.row, Budget()).tokens == []


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_up_to_the_end_of_the_context(temperature: float, tiny: Path) -> None:
    """Windows end in time, the text is that of plain decoding, and some of it was drafted."""
    prompts: Any = [{"prompt_token_ids": [(i * j) % 5 + 5 for j in range(150 + 30 * i)]} for i in range(1, 4)]
    params = SamplingParams(temperature=temperature, seed=2, ignore_eos=True, max_tokens=256)
    expected = [output.outputs[0].token_ids for output in LLM(str(tiny)).generate(prompts, params)]
    llm = LLM(
        str(tiny),
        speculative_config={"method": "lookahead", "window_size": 6, "level": 4, "guess_set_size": 5},
    )
    outputs = llm.generate(prompts, params)
    assert [output.outputs[0].token_ids for output in outputs] == expected
    assert sum(output.speculation.accepted for output in outputs) > 0
    check_idle(llm)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("window_size", 0),
        ("window_size", 65),
        ("level", 1),
        ("level", 2.0),
        ("guess_set_size", True),
        ("pool_from_prompt", 1),
    ],
)
def test_bad_values_are_named(name: str, value: object) -> None:
    with pytest.raises(ConfigError, match=f"{name} must be .*, got"):
        Lookahead.Options(**{name: value})


def test_window_is_a_tree() -> None:
    window = Window([[1, 2], [3, 4, 5], [6, 7, 8]], 3)
    assert window.parents(10) == [ROOT, 10, ROOT, 10, 11, 12, 13, 14]
