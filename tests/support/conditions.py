"""Drafters and requests of the exactness tests, and the outputs of plain decoding."""

from __future__ import annotations

from typing import Any

import pytest
from drafter_cases import PlainOutputs

from outrider import LLM, RequestOutput, SamplingParams
from outrider.testing import (
    KnownTexts,
    Scripts,
    check_idle,
    random_prompts,
    run_staggered,
    use_example,
    visible_parts,
)

PROMPTS = random_prompts(6, seed=1)
SAMPLING: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "sampled": {"temperature": 0.8, "top_p": 0.95},
}
DRAFTERS = ("ngram", "draft_model", "tree", "random_draft", "window", "self")


def params_of(sampling: dict[str, Any], count: int = len(PROMPTS), **more: Any) -> list[SamplingParams]:
    return [
        SamplingParams(seed=i, **{"max_tokens": 24, "ignore_eos": True, **sampling, **more})
        for i in range(count)
    ]


def use_drafter(llm: LLM, drafter: str, known: KnownTexts, random_draft: str, **options: Any) -> None:
    """Put one of `DRAFTERS` to work.

    ngram; draft_model: a copy of the target; tree: the correct path within a random tree; random_draft and
    window: a draft model that is nearly always wrong, with all K/V and with little; self: the target as its
    own draft with little K/V.
    """
    model = {"method": "draft_model", "model": random_draft, "num_speculative_tokens": 3}
    configs: dict[str, dict[str, Any]] = {
        "tree": {
            "method": "scripted",
            "script": Scripts(known).hidden,
            "nodes": 40,
            "num_speculative_tokens": 6,
        },
        "random_draft": {**model, "siblings": 2},
        "window": {**model, "draft_kv_budget": 9, "draft_kv_sink": 3},
        "self": {**model, "model": "self", "siblings": 2, "draft_kv_budget": 24},
    }
    if drafter in configs:
        llm.use({**configs[drafter], **options})
    else:
        use_example(llm, drafter, **options)


def plain_outputs(
    plain: PlainOutputs, prompts: list[list[int]], params: list[SamplingParams]
) -> tuple[list[Any], KnownTexts]:
    """Visible parts of plain decoding of each prompt alone, and the texts for scripts."""
    truth, out = KnownTexts(), []
    for prompt, p in zip(prompts, params):
        outputs = plain(prompt, p).outputs
        truth.learn(prompt, p.seed or 0, outputs)
        out.append(visible_parts(outputs))
    return out, truth


def same_outputs(
    llm: LLM,
    drafter: str,
    params: list[SamplingParams],
    plain: PlainOutputs,
    random_draft: str,
    prompts: list[list[int]] = PROMPTS,
) -> list[RequestOutput]:
    """Outputs of staggered prompts with a drafter, which must be those of plain decoding of each alone."""
    expected, truth = plain_outputs(plain, prompts, params)
    use_drafter(llm, drafter, truth, random_draft)
    outputs = run_staggered(llm, prompts, params)
    assert [visible_parts(o.outputs) for o in outputs] == expected
    check_idle(llm)
    return outputs


def accepted(outputs: list[Any]) -> int:
    return sum(output.speculation.accepted for output in outputs)


each_sampling = pytest.mark.parametrize("sampling", SAMPLING.values(), ids=SAMPLING)
each_drafter = pytest.mark.parametrize("drafter", DRAFTERS)
