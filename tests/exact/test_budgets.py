"""Every drafter, alone and in every mix of two, keeps to every small budget and changes no token."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider import LLM, RequestOutput, SamplingParams, draft
from outrider.config import SpeculativeOptions
from outrider.core.types import ROOT, Batch, Budget, Draft
from outrider.draft.first import First
from outrider.draft.lookahead import Lookahead
from outrider.draft.union import Union
from outrider.drafting.base import Drafter
from outrider.testing import random_prompts, run_staggered, visible_parts

PROMPTS = random_prompts(5, seed=4, longest=20)
PARAMS = [SamplingParams(temperature=0.8 * (i % 2), seed=i, max_tokens=14, ignore_eos=True) for i in range(5)]
SMALL = list(itertools.product(range(4), range(4)))
WIDER = list(itertools.product(range(4), range(8)))  # with 0 … 3 nodes left beside a window of 2, 3 or 4
MIXES = {name for name in draft.names() if issubclass(draft.method(name), Union)}
METHODS = sorted({*draft.names()} - MIXES - {"scripted"})  # whose scripts may propose what they like


def example(name: str, llm: LLM) -> Drafter:
    """The method's own example; lookahead with so small a window that it fits into a small budget."""
    target = llm.engine.target
    if name == "lookahead":
        return Lookahead(Lookahead.Options(window_size=2, level=3, guess_set_size=2), target)
    return draft.method(name).example(target)


@contextmanager
def squeezed(llm: LLM, budgets: list[tuple[int, int]]) -> Iterator[set[tuple[int, int]]]:
    """Deals out `budgets` (depth, nodes) in turn, and checks the trees.  Yields those that trees were proposed for."""
    controller, drafter, met = llm.engine.controller, llm.engine.drafter, set[tuple[int, int]]()
    dealt = itertools.cycle(budgets)
    propose = drafter.propose

    def budget(batch: Batch) -> list[Budget]:
        found = []
        for step in batch:
            depth, nodes = next(dealt) if step.emits else (0, 0)
            met.add((depth, nodes))
            found.append(Budget(min(depth, step.row.remaining - 1), nodes))
        return found

    def checked(batch: Batch) -> Draft:
        proposed = propose(batch)
        for tree, step in zip(proposed.trees, batch):
            levels, allowed = {ROOT: 0}, step.budget
            assert len(tree.tokens) <= allowed.nodes
            for i, parent in enumerate(tree.parents):
                levels[i] = levels[parent] + 1
                assert levels[i] <= allowed.depth or i >= tree.size
        return proposed

    llm.engine.controller.budget = budget  # type: ignore[method-assign]
    drafter.propose = checked  # type: ignore[method-assign]
    try:
        yield met
    finally:
        llm.engine.controller, drafter.propose = controller, propose  # type: ignore[method-assign]


@pytest.fixture(scope="module")
def expected(plain: LLM) -> list[RequestOutput]:
    return [
        plain.generate({"prompt_token_ids": prompt}, params)[0] for prompt, params in zip(PROMPTS, PARAMS)
    ]


def same_text(
    llm: LLM, drafter: Drafter, budgets: list[tuple[int, int]], expected: list[RequestOutput]
) -> None:
    llm.engine.use(drafter, SpeculativeOptions.of({"method": "off"}))
    with squeezed(llm, budgets) as met:
        got = run_staggered(llm, PROMPTS, PARAMS)
    assert met >= set(budgets)
    assert [visible_parts(one.outputs) for one in got] == [visible_parts(one.outputs) for one in expected]


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
def test_alone(name: str, fast: LLM, expected: list[RequestOutput]) -> None:
    same_text(fast, example(name, fast), SMALL, expected)


@pytest.mark.parametrize("mix", [First, Union], ids=["first", "union"])
@pytest.mark.parametrize("name", METHODS)
def test_in_front_of_every_other(
    name: str, mix: type[Union], fast: LLM, expected: list[RequestOutput]
) -> None:
    """Lookahead's window takes nodes, and what stands behind it in `first` gets the few that are left."""
    for other in METHODS:
        pair = [example(name, fast), example(other, fast)]
        same_text(fast, mix(mix.Options(), fast.engine.target, pair), WIDER, expected)
