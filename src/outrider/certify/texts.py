"""Comparison of speculative texts with those of plain decoding, token by token."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from outrider.certify.ties import Gap
from outrider.core.params import SamplingParams
from outrider.llm import LLM
from outrider.outputs import CompletionOutput

GREEDY: Mapping[str, Any] = {"temperature": 0.0}
SEEDED: tuple[Mapping[str, Any], ...] = ({"temperature": 0.8}, {"temperature": 0.8, "top_p": 0.95})


@dataclass
class Difference:
    """The first position at which two texts differ.

    before: tokens that both have.  plain, speculative: the next token, None if the text has ended.
    gap: scores at this position, once it has been examined.
    """

    prompt: list[int]
    params: SamplingParams
    before: list[int]
    plain: int | None
    speculative: int | None
    gap: Gap | None = None

    @property
    def explained(self) -> bool:
        return self.gap is not None and self.gap.explained


@dataclass
class Tally:
    """Comparison under one set of parameters.

    joined: texts that started while others were running.
    logprob_difference: the largest one, over tokens that both texts have.
    """

    sampling: Mapping[str, Any]
    batched: bool
    texts: int = 0
    tokens: int = 0
    joined: int = 0
    logprob_difference: float = 0.0
    differences: list[Difference] = field(default_factory=list)

    def add(
        self, prompt: list[int], params: SamplingParams, plain: CompletionOutput, fast: CompletionOutput
    ) -> None:
        self.texts += 1
        common = 0
        for ours, theirs in zip(plain.token_ids, fast.token_ids):
            if ours != theirs:
                break
            common += 1
        self.tokens += common
        for token, a, b in zip(plain.token_ids[:common], plain.logprobs or (), fast.logprobs or ()):
            self.logprob_difference = max(self.logprob_difference, abs(a[token].logprob - b[token].logprob))
        if (plain.token_ids, plain.finish_reason) != (fast.token_ids, fast.finish_reason):
            self.tokens += 1  # the one that differs
            first, second = (
                out.token_ids[common] if common < len(out.token_ids) else None for out in (plain, fast)
            )
            self.differences.append(Difference(prompt, params, plain.token_ids[:common], first, second))


class TextComparison:
    """Comparison of two engines: plain decoding alone, speculation alone and in a batch.

    Plain decoding begins every prompt with an empty prefix cache.
    """

    def __init__(
        self, plain: LLM, speculative: LLM, settings: Sequence[Mapping[str, Any]], seed: int
    ) -> None:
        self.plain, self.speculative, self.settings = plain, speculative, settings
        self.tallies = [Tally(sampling, batched) for sampling in settings for batched in (False, True)]
        self.seeds = itertools.count(1000 * seed)
        self.rounds = 0

    def round(self, prompts: Sequence[list[int]], tokens: int) -> Iterator[list[int]]:
        """Compare answers of about `tokens` tokens; yields prompt and plain answer as one list."""
        for sampling, alone, batched in zip(self.settings, self.tallies[::2], self.tallies[1::2]):
            params = [self._params(i, tokens, sampling) for i in range(len(prompts))]
            expected: list[CompletionOutput] = []
            for prompt, p in zip(prompts, params):
                self.plain.engine.forget_prefixes()
                expected += answers(self.plain, [prompt], [p])
                yield prompt + expected[-1].token_ids
                alone.add(prompt, p, expected[-1], *answers(self.speculative, [prompt], [p]))
            if self.rounds % 2 == 0:
                self.speculative.engine.forget_prefixes()  # other rounds find the prefixes of the texts alone
            for case in zip(prompts, params, expected, answers(self.speculative, prompts, params)):
                batched.add(*case)
            batched.joined += max(0, len(prompts) - self.speculative.engine.options.max_num_seqs)
        self.rounds += 1

    def _params(self, i: int, tokens: int, sampling: Mapping[str, Any]) -> SamplingParams:
        """Lengths differ, so that texts end while others in the batch go on; every other text ignores EOS."""
        max_tokens = max(1, tokens - i % 4 * tokens // 6)
        return SamplingParams(
            seed=next(self.seeds), max_tokens=max_tokens, ignore_eos=i % 2 == 1, logprobs=0, **sampling
        )


def answers(
    llm: LLM, prompts: Sequence[list[int]], params: Sequence[SamplingParams]
) -> list[CompletionOutput]:
    """Raise the error of a prompt that was not answered."""
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params)
    for output in outputs:
        if output.error is not None:
            raise output.error
    return [output.outputs[0] for output in outputs]
