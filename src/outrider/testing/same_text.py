"""The contract of lossless speculation as one assertion."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

from outrider.core.params import SamplingParams
from outrider.llm import LLM
from outrider.testing.checkpoints import VOCABULARY
from outrider.testing.driver import check_idle, check_statistics, run_staggered, visible_parts

DEFAULT_PARAMS = (
    SamplingParams(temperature=0, seed=0, max_tokens=24, ignore_eos=True),
    SamplingParams(temperature=0.8, top_p=0.95, seed=1, max_tokens=24, ignore_eos=True),
    SamplingParams(temperature=0.8, n=2, seed=2, max_tokens=24, presence_penalty=1.0),
)


def random_prompts(
    count: int, seed: int = 0, longest: int = 40, vocabulary: int = VOCABULARY
) -> list[list[int]]:
    """Prompts of random length from 3 to `longest`; token ids from 5 on, which leaves special tokens out."""
    rng = random.Random(seed)
    return [[rng.randrange(5, vocabulary) for _ in range(rng.randint(3, longest))] for _ in range(count)]


def assert_same_text(
    llm: LLM,
    speculative_config: Mapping[str, Any],
    prompts: Sequence[Sequence[int]] | None = None,
    params: Sequence[SamplingParams] = DEFAULT_PARAMS,
) -> int:
    """Raise AssertionError unless speculation leaves every token and text of `llm` unchanged.

    Prompts (random ones by default) are answered one by one without a drafter. Then they arrive one after
    another with the drafter of `speculative_config`, all of them under each of `params`, which need a seed.
    Tokens, text, finish_reason and stop_reason must be equal. No page may be lost. `llm` has no drafter in
    the end.

    Returns the number of accepted draft tokens: 0 means that this run exercised rejection only.
    """
    vocabulary, longest = llm.engine.target.vocabulary, min(40, llm.engine.max_len // 4)
    prompts = random_prompts(5, longest=longest, vocabulary=vocabulary) if prompts is None else prompts
    assert all(p.seed is not None or p.temperature == 0 for p in params), "sampled requests need a seed"
    llm.use(None)
    expected = [[llm.generate(list(prompt), p)[0].outputs for prompt in prompts] for p in params]
    llm.use(speculative_config)
    try:
        accepted = 0
        for p, plain in zip(params, expected):
            llm.engine.forget_prefixes()
            found = run_staggered(llm, prompts, p)
            for prompt, before, after in zip(prompts, plain, found):
                assert visible_parts(after.outputs) == visible_parts(before), f"prompt {list(prompt)}, {p}"
                check_statistics(after.outputs)
                accepted += after.speculation.accepted
        check_idle(llm)
    finally:
        llm.use(None)
    return accepted
