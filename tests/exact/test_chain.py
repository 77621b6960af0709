"""A draft model's chain in one call equals the chain level by level, for any parameters."""

from __future__ import annotations

import itertools

import pytest
from helpers import answer

from outrider import LLM, SamplingParams
from outrider.core.step import Batch
from outrider.core.tree import Draft
from outrider.draft.draft_model import DraftModel
from outrider.models.decoder import Decoder
from outrider.testing import random_prompts

SAMPLING = (
    {"temperature": 0.0},
    {"temperature": 0.8},
    {"temperature": 1.2, "top_p": 0.9, "min_p": 0.02},
    {"temperature": 0.9, "top_k": 7},
)


def listen(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> list[list[list[int]]]:
    heard: list[list[list[int]]] = []
    propose = DraftModel.propose

    def listening(self: DraftModel, batch: Batch) -> Draft:
        draft = propose(self, batch)
        heard.append([tree.tokens for tree in draft.trees])
        return draft

    monkeypatch.setattr(DraftModel, "propose", listening)
    return heard


@pytest.mark.parametrize("rows", [1, 4])
def test_one_call_equals_one_level_after_another(
    rows: int, fast: LLM, random_draft: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of different distributions and lengths, so that chains end at different levels."""
    prompts = random_prompts(rows)
    params = [
        SamplingParams(max_tokens=9 + 4 * i, seed=i, ignore_eos=True, **sampling)
        for i, sampling in zip(range(rows), itertools.cycle(SAMPLING))
    ]
    output = []
    for alone in (True, False):
        with monkeypatch.context() as patch:
            heard = listen(fast, patch)
            if not alone:
                patch.setattr(Decoder, "fuses_chains", False)
            fast.use({"method": "draft_model", "model": random_draft, "num_speculative_tokens": 5})
            for sampling in SAMPLING if rows == 1 else [{}]:
                asked = (
                    [SamplingParams(max_tokens=12, seed=3, ignore_eos=True, **sampling)]
                    if rows == 1
                    else params
                )
                fast.generate([{"prompt_token_ids": prompt} for prompt in prompts], asked)
            output.append(heard)
    assert output[0] == output[1]
    assert sum(len(tokens) for step in output[0] for tokens in step) > 40


def test_draft_model_with_nan_weights_drafts_nothing(fast: LLM, random_draft: str) -> None:
    fast.use({"method": "draft_model", "model": random_draft, "num_speculative_tokens": 3})
    fast.engine.drafter.decoder.norm.fill_(float("nan"))  # type: ignore[attr-defined]
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    broken = answer(fast, random_prompts(1)[0], params)
    fast.use(None)
    assert broken.outputs[0].token_ids == answer(fast, random_prompts(1)[0], params).outputs[0].token_ids
    assert broken.speculation.drafted == 0
