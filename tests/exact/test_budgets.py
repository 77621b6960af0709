"""Every drafter, alone and in mixes of two, keeps to every small budget and leaves the tokens unchanged."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider import LLM, RequestOutput, SamplingParams, draft
from outrider.config import SpeculativeOptions
from outrider.core.step import Batch
from outrider.core.tree import ROOT, Budget, Draft
from outrider.draft.first import First
from outrider.draft.lookahead import Lookahead
from outrider.draft.union import Union
from outrider.drafting.base import Drafter, Target
from outrider.testing import random_prompts, run_staggered, visible_parts

PROMPTS = random_prompts(5, seed=4, longest=20)
PARAMS = [SamplingParams(temperature=0.8 * (i % 2), seed=i, max_tokens=14, ignore_eos=True) for i in range(5)]
SMALL = list(itertools.product(range(4), range(4)))  # (depth, nodes)
WIDER = list(itertools.product(range(4), range(8)))  # leaves 0 to 3 nodes beside a window of 2, 3 or 4
MIXES = {name for name in draft.names() if issubclass(draft.method(name), Union)}
METHODS = sorted({*draft.names()} - MIXES - {"scripted"})  # a script may exceed its budget


def example(name: str, target: Target) -> Drafter:
    """The method's example; for lookahead one whose window fits into a small budget."""
    if name == "lookahead":
        return Lookahead(Lookahead.Options(window_size=2, level=3, guess_set_size=2), target)
    return draft.method(name).example(target)


@contextmanager
def granting(llm: LLM, budgets: list[tuple[int, int]]) -> Iterator[set[tuple[int, int]]]:
    """Grant `budgets` (depth, nodes) in turn and check each tree.  Yields the set of granted ones."""
    controller, drafter, granted = llm.engine.controller, llm.engine.drafter, set[tuple[int, int]]()
    turns = itertools.cycle(budgets)
    propose = drafter.propose

    def budget(batch: Batch) -> list[Budget]:
        found = []
        for step in batch:
            depth, nodes = next(turns) if step.emits else (0, 0)
            granted.add((depth, nodes))
            found.append(Budget(min(depth, step.row.remaining - 1), nodes))
        return found

    def checked(batch: Batch) -> Draft:
        proposed = propose(batch)
        for tree, step in zip(proposed.trees, batch):
            depths, allowed = {ROOT: 0}, step.budget
            assert len(tree.tokens) <= allowed.nodes
            for i, parent in enumerate(tree.parents):
                depths[i] = depths[parent] + 1
                assert depths[i] <= allowed.depth or i >= tree.size
        return proposed

    llm.engine.controller.budget = budget  # type: ignore[method-assign]
    drafter.propose = checked  # type: ignore[method-assign]
    try:
        yield granted
    finally:
        llm.engine.controller, drafter.propose = controller, propose  # type: ignore[method-assign]


@pytest.fixture(scope="module")
def expected(plain: LLM) -> list[RequestOutput]:
    return [
        plain.generate({"prompt_token_ids": prompt}, params)[0] for prompt, params in zip(PROMPTS, PARAMS)
    ]


def assert_plain_output(
    llm: LLM, drafter: Drafter, budgets: list[tuple[int, int]], expected: list[RequestOutput]
) -> None:
    llm.engine.use(drafter, SpeculativeOptions.of({"method": "off"}))
    with granting(llm, budgets) as granted:
        outputs = run_staggered(llm, PROMPTS, PARAMS)
    assert granted >= set(budgets)
    assert [visible_parts(o.outputs) for o in outputs] == [visible_parts(o.outputs) for o in expected]


@given(st.integers(-2, 9), st.integers(-2, 9), st.integers(-2, 9))
def test_depth_never_exceeds_nodes(depth: int, nodes: int, fewer: int) -> None:
    """Nor is there one without the other, however a budget is made."""
    budget = Budget(depth, nodes)
    for made in (budget, budget.within(nodes=fewer), budget.within(depth=fewer)):
        assert 0 <= made.depth <= made.nodes and (made.depth > 0) == (made.nodes > 0)
    assert budget.depth == (max(0, min(depth, nodes))) and budget.nodes in (0, nodes)
    assert budget.within(nodes=fewer) == Budget(budget.depth, min(budget.nodes, fewer))
    assert budget.within(depth=fewer) == Budget(min(budget.depth, fewer), budget.nodes)


@pytest.mark.parametrize("name", METHODS)
def test_small_budgets_leave_the_output_unchanged(
    name: str, fast: LLM, expected: list[RequestOutput]
) -> None:
    assert_plain_output(fast, example(name, fast.engine.target), SMALL, expected)


def pairs_with(name: str, numbers: Collection[int]) -> list[list[Callable[[Target], Drafter]]]:
    """Makers of the examples of a method and, after it, of others: a quarter of them for each of 0 … 3."""
    at = METHODS.index(name)
    others = [other for i, other in enumerate(METHODS) if i != at and (i - at) % len(METHODS) % 4 in numbers]
    return [[partial(example, name), partial(example, other)] for other in others]


@pytest.mark.parametrize("name", METHODS)
def test_a_mix_of_two_keeps_to_its_budget(name: str, fast: LLM, expected: list[RequestOutput]) -> None:
    """Each method before a quarter of the others, and behind another quarter, as `first` or as `union`.

    The window of lookahead takes nodes; what follows it in `first` gets the few that are left.
    """
    for i, pair in enumerate(pairs_with(name, [1])):
        mix = (First, Union)[i % 2]
        assert_plain_output(fast, mix(mix.Options(), fast.engine.target, pair), WIDER, expected)


@pytest.mark.full
@pytest.mark.parametrize("mix", [First, Union], ids=["first", "union"])
@pytest.mark.parametrize("name", METHODS)
def test_every_mix_of_two_keeps_to_its_budget(
    name: str, mix: type[Union], fast: LLM, expected: list[RequestOutput]
) -> None:
    for pair in pairs_with(name, range(4)):
        assert_plain_output(fast, mix(mix.Options(), fast.engine.target, pair), WIDER, expected)
