"""Confidence of a draft model's chains: measured for an adaptive controller, a constant otherwise."""

from __future__ import annotations

from array import array
from typing import Any

import pytest

from outrider import LLM, SamplingParams
from outrider.bench.prompts import TASKS, rendered
from outrider.core.row import Row
from outrider.core.step import Batch
from outrider.core.step_input import StepInput
from outrider.core.stop_rule import measure
from outrider.core.tree import ROOT, Budget, Draft, DraftTree
from outrider.drafting.trees.builder import RANK_CONFIDENCE

CONFIG = {"model": "builtin-draft", "num_speculative_tokens": 4}
FLOOR = 0.9
Seen = list[tuple[list[int], DraftTree]]


@pytest.fixture(scope="module")
def target() -> LLM:
    return LLM("builtin", max_num_seqs=1, max_model_len=256)


def drafted(target: LLM, temperature: float, floor: float = 0.0, **config: Any) -> tuple[Any, Seen]:
    """The drafter, and the tokens before every draft with its tree."""
    engine, seen = target.variant({**CONFIG, **config}).engine, Seen()
    propose = engine.drafter.propose

    def noted(batch: Batch) -> Draft:
        for step in batch:
            step.budget = Budget(step.budget.depth, step.budget.nodes, floor)
        draft = propose(batch)
        seen.extend((step.row.tokens[:], tree) for step, tree in zip(batch, draft.trees) if tree.tokens)
        return draft

    engine.drafter.propose = noted  # type: ignore[method-assign]
    if config.get("adaptive"):
        engine.controller = engine.controller.limits  # type: ignore[attr-defined]
    params = SamplingParams(temperature=temperature, max_tokens=32, seed=2)
    prompt = rendered(TASKS[0], target.tokenizer)["prompt_token_ids"]
    distribution, ending = params.distribution, frozenset[int]()
    engine.add(Row("0", 0, prompt, len(prompt), params, distribution, 2, (), len(prompt) + 32, ending))
    while engine.busy:
        engine.step()
    return engine.drafter, seen


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("rule", ["match", "rejection"])
def test_an_adaptive_controller_gets_the_draft_models_probabilities(
    target: LLM, temperature: float, rule: str
) -> None:
    drafter, seen = drafted(target, temperature, adaptive=True, verification=rule)
    assert len(seen) > 2
    for tokens, tree in seen:
        ids, decoder, step_input = [*tokens, *tree.tokens], drafter.decoder, StepInput()
        pool = decoder.pool(len(ids))
        step_input.chain(array("i", range(len(ids))), 0, ids)
        x = decoder.forward(step_input.build(), pool)
        for i, (token, confidence) in enumerate(zip(tree.tokens, tree.confidence)):
            if rule == "rejection" and temperature:
                assert confidence < 1 and len({*tree.confidence}) == 1, "a sample's is that of its rank"
                continue
            logits = decoder.logits(x, [len(tokens) - 1 + i])[0]
            assert confidence == pytest.approx(measure(logits, temperature, token)[0], rel=1e-3)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("siblings", [1, 2])
def test_a_draft_ends_at_the_floor_of_its_budget(target: LLM, temperature: float, siblings: int) -> None:
    """In the backend's chains, and in trees: behind the first level whose paths all lie below it."""
    config = {"adaptive": True, "siblings": siblings}
    free, floored = (drafted(target, temperature, floor=floor, **config)[1] for floor in (0.0, FLOOR))
    whole, ended = {tuple(tokens): tree for tokens, tree in free}, 0
    for tokens, tree in floored:
        if tuple(tokens) not in whole:
            continue
        levels = best_by_level(whole[tuple(tokens)])
        expected = next((i for i, best in enumerate(levels, start=1) if best < FLOOR), len(levels))
        assert len(best_by_level(tree)) == expected
        ended += expected < len(levels)
    assert ended


def best_by_level(tree: DraftTree) -> list[float]:
    """Confidence of the best path to each level."""
    paths, best = {ROOT: (0, 1.0)}, list[float]()
    for i, (parent, confidence) in enumerate(zip(tree.parents, tree.confidence)):
        depth, joint = paths[parent]
        paths[i] = depth + 1, joint * confidence
        best += [0.0] * (depth + 1 - len(best))
        best[depth] = max(best[depth], joint * confidence)
    return best


def test_a_fixed_length_needs_no_probabilities(target: LLM) -> None:
    _, seen = drafted(target, 0.0)
    assert {p for _, tree in seen for p in tree.confidence} == {RANK_CONFIDENCE[0]}
