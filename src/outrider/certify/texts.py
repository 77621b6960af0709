"""Comparison of speculative texts with those of plain decoding, token by token."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from outrider.bench.measure import answers_of
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
    logprob_difference: the largest one, over tokens that both texts have; infinite if one is missing or is
        not a number.
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
        shared = shared_beginning(plain.token_ids, fast.token_ids)
        self.tokens += len(shared)
        for place, token in enumerate(shared):
            distance = abs(logprob_at(plain, place, token) - logprob_at(fast, place, token))
            self.logprob_difference = max(
                self.logprob_difference, math.inf if math.isnan(distance) else distance
            )
        if (plain.token_ids, plain.finish_reason) != (fast.token_ids, fast.finish_reason):
            self.tokens += 1  # the one that differs
            ours, theirs = token_at(plain, len(shared)), token_at(fast, len(shared))
            self.differences.append(Difference(prompt, params, shared, ours, theirs))


def shared_beginning(ours: Sequence[int], theirs: Sequence[int]) -> list[int]:
    """The tokens before the first that differs."""
    shorter = min(len(ours), len(theirs))
    length = next((i for i in range(shorter) if ours[i] != theirs[i]), shorter)
    return list(ours[:length])


def token_at(output: CompletionOutput, place: int) -> int | None:
    """The token of a text at a place; None where the text has ended."""
    return output.token_ids[place] if place < len(output.token_ids) else None


def logprob_at(output: CompletionOutput, place: int, token: int) -> float:
    """The log-probability of the token at a place of a text; NaN if it is missing."""
    found = output.logprobs or ()
    return found[place][token].logprob if place < len(found) else math.nan


class Setting(NamedTuple):
    """Sampling parameters, and the comparisons under them: of texts alone, and in a batch."""

    sampling: Mapping[str, Any]
    alone: Tally
    batched: Tally


class TextComparison:
    """Comparison of two engines: plain decoding alone, speculation alone and in a batch.

    Plain decoding begins every prompt with an empty prefix cache.
    """

    def __init__(
        self, plain: LLM, speculative: LLM, settings: Sequence[Mapping[str, Any]], seed: int
    ) -> None:
        self.plain, self.speculative = plain, speculative
        self.settings = [Setting(each, Tally(each, False), Tally(each, True)) for each in settings]
        self.seeds = itertools.count(1000 * seed)
        self.rounds = 0

    @property
    def tallies(self) -> list[Tally]:
        """All comparisons."""
        return [tally for setting in self.settings for tally in (setting.alone, setting.batched)]

    def round(self, prompts: Sequence[list[int]], tokens: int) -> Iterator[list[int]]:
        """Compare answers of about `tokens` tokens; yields prompt and plain answer as one list."""
        for sampling, alone, batched in self.settings:
            params = [self._params(i, tokens, sampling) for i in range(len(prompts))]
            expected: list[CompletionOutput] = []
            for prompt, p in zip(prompts, params):
                self.plain.engine.forget_prefixes()
                expected += answers(self.plain, [prompt], [p])
                yield prompt + expected[-1].token_ids
                alone.add(prompt, p, expected[-1], *answers(self.speculative, [prompt], [p]))
            if self.rounds % 2 == 0:
                self.speculative.engine.forget_prefixes()  # other rounds find the prefixes of the texts alone
            together = answers(self.speculative, prompts, params)
            for i, prompt in enumerate(prompts):
                batched.add(prompt, params[i], expected[i], together[i])
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
    return answers_of(llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params))
