"""Temperatures near 0: speculation leaves the text as it is, and the coldest one is greedy."""

from __future__ import annotations

import pytest
from drafter_cases import DRAFT_MODELS, PlainOutputs, use_drafter

from outrider import LLM, SamplingParams
from outrider.testing import KnownTexts, check_idle, random_prompts, run_staggered, visible_parts

PROMPTS = random_prompts(3, seed=5)
COLD = (3e-3, 1e-4, 1e-9, 5e-324)
DRAFTERS = (
    "off",
    "ngram",
    "scripted:right",
    "scripted:wide",
    *(f"draft_model:{kind}" for kind in DRAFT_MODELS),
)
FILTERS = ({}, {"top_p": 0.9}, {"top_k": 5, "min_p": 0.1})


@pytest.mark.parametrize("temperature", COLD)
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_speculation_leaves_texts_of_low_temperatures_unchanged(
    drafter: str, temperature: float, outputs_of: PlainOutputs, fast: LLM, random_draft: str
) -> None:
    params = [
        SamplingParams(temperature=temperature, seed=i, max_tokens=20, ignore_eos=True, logprobs=1, **more)
        for i, more in enumerate(FILTERS)
    ]
    expected = [outputs_of(prompt, one) for prompt, one in zip(PROMPTS, params)]
    known = KnownTexts()
    for i, (prompt, output) in enumerate(zip(PROMPTS, expected)):
        known.learn(prompt, i, output.outputs)
    use_drafter(fast, drafter, known, random_draft)
    outputs = run_staggered(fast, PROMPTS, params)
    assert [visible_parts(o.outputs) for o in outputs] == [visible_parts(o.outputs) for o in expected]
    check_idle(fast)


@pytest.mark.parametrize("rule", ["match", "rejection", "block", "traversal"])
def test_the_coldest_temperature_is_greedy_under_every_rule(
    rule: str, outputs_of: PlainOutputs, fast: LLM, random_draft: str
) -> None:
    fast.use({"model": random_draft, "num_speculative_tokens": 3, "verification": rule})
    for i, prompt in enumerate(PROMPTS):
        greedy = outputs_of(prompt, SamplingParams(temperature=0, max_tokens=20, ignore_eos=True))
        (cold,) = fast.generate(
            {"prompt_token_ids": prompt},
            SamplingParams(temperature=1e-300, seed=i, max_tokens=20, ignore_eos=True),
        )
        assert cold.outputs[0].token_ids == greedy.outputs[0].token_ids


@pytest.mark.parametrize("temperature", [1e-300, 1e300])
def test_extreme_temperatures_keep_masked_tokens_out(temperature: float, plain: LLM) -> None:
    params = SamplingParams(
        temperature=temperature,
        seed=1,
        max_tokens=30,
        ignore_eos=True,
        allowed_token_ids=[7, 8, 9],
        logprobs=0,
    )
    (sample,) = plain.generate({"prompt_token_ids": PROMPTS[0]}, params)[0].outputs
    assert {*sample.token_ids} <= {7, 8, 9} and len(sample.token_ids) == 30
