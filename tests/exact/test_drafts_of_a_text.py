"""A draft depends on the text alone, not on how the drafter came to know it.

Chunks of a prompt, cached pages, other rows, steps without drafts and preemption must not show in what is
drafted: a drafter that misses a position, or reads it at another one, still emits the right tokens, and is
accepted less.
"""

from __future__ import annotations

import random
from typing import Any

import pytest

from outrider import LLM, SamplingParams, draft
from outrider.cache.catch_up import Cursor
from outrider.core.step import Batch
from outrider.core.tree import EMPTY_TREE, NO_BUDGET, Budget, Draft
from outrider.testing import EngineDriver, random_prompts, run_staggered, use_example

# Those that learn from requests, or from what was accepted of this one, and those that do not compute
# anything.
OTHERS = {
    *("auto", "datastore", "first", "grammar", "layerskip", "lookahead", "ngram", "off", "prediction"),
    *("recycle", "scripted", "stand", "suffix", "union"),
}
METHODS = [name for name in draft.names() if name not in OTHERS]
HALF, START = random_prompts(2, seed=3, longest=90)
PROMPTS = [*random_prompts(3, seed=2, longest=90), [*START, 7], [*START, 9, *HALF], [*START, 9, *HALF]]
SAMPLING = [
    SamplingParams(
        temperature=0.8 * (i % 2),
        seed=i,
        n=1 + i % 3 // 2,
        max_tokens=20,
        ignore_eos=True,
        allowed_token_ids=range(5 + i, 300, 100 if i < 3 else 4),  # few, so that drafts are accepted
    )
    for i in range(len(PROMPTS))
]
Drafts = dict[tuple[tuple[int, ...], int, int, Budget], tuple[list[int], list[int]]]


def recorded(llm: LLM, method: str, verified: bool) -> Drafts:
    """What an engine drafts from now on, by text, seed, sample and budget.

    verified: drafts are, but for some steps without any.  Otherwise none is, so that one follows every token.
    """
    use_example(llm, method)
    drafter: Any = llm.engine.drafter
    if drafter.memory is not None:  # which ranks were right so far
        learning = "learn" if hasattr(drafter.memory, "learn") else "update"
        assert hasattr(drafter.memory, learning)
        setattr(drafter.memory, learning, lambda *_: None)
    drafts, propose, budget = Drafts(), drafter.propose, llm.engine.controller.budget
    rng = random.Random(0)

    def proposed(batch: Batch) -> Draft:
        made: Draft = propose(batch)
        for step, tree in zip(batch, made.trees):
            if tree.tokens:
                row = step.row
                key = tuple(row.tokens), row.seed, row.index, step.budget
                drafts[key] = tree.tokens, tree.parents
        return made if verified else Draft([EMPTY_TREE] * len(batch))

    def paused(batch: Batch) -> list[Budget]:
        plain = rng.random() < 0.2
        return [NO_BUDGET if plain or rng.random() < 0.2 else each for each in budget(batch)]

    drafter.propose = proposed
    if verified:
        llm.engine.controller.budget = paused  # type: ignore[method-assign]
    return drafts


def alone(llm: LLM, method: str) -> Drafts:
    drafts = recorded(llm, method, verified=False)
    for prompt, params in zip(PROMPTS, SAMPLING):
        driver = EngineDriver(llm)
        request = driver.add_request(prompt, params)
        while not request.finished:
            driver.step()
    return drafts


def together(llama: str, method: str) -> Drafts:
    """The same requests beside each other, in chunks, with cached pages of each other."""
    llm = LLM(llama, max_num_seqs=3, max_num_batched_tokens=80, max_model_len=224)
    drafts = recorded(llm, method, verified=True)
    hits = llm.engine.scheduler.prefix_hits
    run_staggered(llm, PROMPTS, SAMPLING)
    assert llm.engine.scheduler.prefix_hits > hits
    return drafts


def compared(one: Drafts, other: Drafts) -> tuple[int, int]:
    """How many drafts of the same texts there are, and how many of them differ."""
    both = one.keys() & other.keys()
    return len(both), sum(one[key] != other[key] for key in both)


@pytest.mark.parametrize("method", METHODS)
def test_a_draft_depends_on_the_text_alone(method: str, plain: LLM, llama: str) -> None:
    count, different = compared(alone(plain, method), together(llama, method))
    assert count > 20 and not different


@pytest.mark.parametrize("method", ["eagle", "dflash", "hydra"])
def test_states_at_other_positions_are_noticed(
    method: str, plain: LLM, llama: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each chunk of a prompt gives the state of a token to the next one."""
    expected, append = alone(plain, method), Cursor.append
    monkeypatch.setattr(Cursor, "append", lambda self, start, x: append(self, start, x.roll(1, 0)))
    assert compared(expected, together(llama, method))[1]
