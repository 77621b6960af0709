"""Prompts of the mutation tests, their plain output, and an engine whose drafter knows it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from helpers import answer, token_prompts

from outrider import LLM, RequestOutput, SamplingParams
from outrider.testing import KnownTexts, Scripts, check_idle, random_prompts

PROMPTS = random_prompts(4, seed=4)
GREEDY = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
SAMPLED = SamplingParams(temperature=0.8, seed=5, max_tokens=30, ignore_eos=True)
DEPTH = 6


def outcome(output: RequestOutput) -> Any:
    """Everything that must not change; log-probabilities are None unless requested."""
    return [(sample.token_ids, sample.logprobs) for sample in output.outputs], output.prompt_logprobs


class Scene:
    """`params` one for all prompts, or one for each, with seed 5; `script` one of `Scripts`."""

    def __init__(
        self, plain: LLM, fast: LLM, params: SamplingParams | Sequence[SamplingParams], script: str
    ) -> None:
        self.llm, self.params = (
            fast,
            [params] * len(PROMPTS) if isinstance(params, SamplingParams) else list(params),
        )
        truth = KnownTexts()
        outputs = [answer(plain, prompt, p) for prompt, p in zip(PROMPTS, self.params)]
        for prompt, output in zip(PROMPTS, outputs):
            truth.learn(prompt, 5, output.outputs)
        self.expected = [outcome(output) for output in outputs]
        ahead = truth.continuation
        truth.continuation = lambda row, count: ahead(row, count) if row.seed == 5 else []
        fast.use(
            {
                "method": "scripted",
                "script": getattr(Scripts(truth), script),
                "nodes": 40,
                "num_speculative_tokens": DEPTH,
            }
        )

    def differences(self) -> int:
        """How many prompts come out differently."""
        outputs = self.llm.generate(token_prompts(PROMPTS), self.params)
        return sum(outcome(output) != e for output, e in zip(outputs, self.expected))

    def healthy(self) -> None:
        assert self.differences() == 0
        check_idle(self.llm)
        self.llm.engine.forget_prefixes()


Setup = Callable[..., Scene]
