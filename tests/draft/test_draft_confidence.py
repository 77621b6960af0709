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
from outrider.core.tree import Draft, DraftTree
from outrider.drafting.trees.builder import RANK_CONFIDENCE

CONFIG = {"model": "builtin-draft", "num_speculative_tokens": 4}
Seen = list[tuple[list[int], DraftTree]]


@pytest.fixture(scope="module")
def target() -> LLM:
    return LLM("builtin", max_num_seqs=1, max_model_len=256)


def drafted(target: LLM, temperature: float, **config: Any) -> tuple[Any, Seen]:
    """The drafter, and the tokens before every draft with its tree."""
    engine, seen = target.variant({**CONFIG, **config}).engine, Seen()
    propose = engine.drafter.propose

    def noted(batch: Batch) -> Draft:
        draft = propose(batch)
        seen.extend((step.row.tokens[:], tree) for step, tree in zip(batch, draft.trees) if tree.tokens)
        return draft

    engine.drafter.propose = noted  # type: ignore[method-assign]
    if config.get("adaptive"):
        engine.controller = engine.controller.limits  # type: ignore[attr-defined]
    params = SamplingParams(temperature=temperature, max_tokens=12, seed=2)
    prompt = rendered(TASKS[0], target.tokenizer)["prompt_token_ids"]
    distribution, ending = params.distribution, frozenset[int]()
    engine.add(Row("0", 0, prompt, len(prompt), params, distribution, 2, (), len(prompt) + 12, ending))
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


def test_a_fixed_length_needs_no_probabilities(target: LLM) -> None:
    _, seen = drafted(target, 0.0)
    assert {p for _, tree in seen for p in tree.confidence} == {RANK_CONFIDENCE[0]}
