"""Token for token: speculative texts against those of plain decoding, one at a time and in company."""

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
    """Where two texts part.  said, plain: the two tokens, None where a text had ended.  gap: filled in when it has been looked at."""

    prompt: list[int]
    params: SamplingParams
    before: list[int]  # the tokens that both said
    plain: int | None
    said: int | None
    gap: Gap | None = None

    @property
    def explained(self) -> bool:
        return self.gap is not None and self.gap.explained


@dataclass
class Tally:
    """What was compared under one set of parameters.  apart: the largest difference of the log-probabilities of equal tokens."""

    sampling: Mapping[str, Any]
    together: bool
    texts: int = 0
    tokens: int = 0
    joined: int = 0  # texts that began beside others that were running
    apart: float = 0.0
    differences: list[Difference] = field(default_factory=list)

    def add(
        self, prompt: list[int], params: SamplingParams, plain: CompletionOutput, fast: CompletionOutput
    ) -> None:
        self.texts += 1
        common = sum(
            1
            for _ in itertools.takewhile(
                lambda pair: pair[0] == pair[1], zip(plain.token_ids, fast.token_ids)
            )
        )
        self.tokens += common
        for token, mine, theirs in zip(plain.token_ids[:common], plain.logprobs or (), fast.logprobs or ()):
            self.apart = max(self.apart, abs(mine[token].logprob - theirs[token].logprob))
        if (plain.token_ids, plain.finish_reason) != (fast.token_ids, fast.finish_reason):
            self.tokens += 1  # the one that differs was compared, too
            a, b = (out.token_ids[common] if common < len(out.token_ids) else None for out in (plain, fast))
            self.differences.append(Difference(prompt, params, plain.token_ids[:common], a, b))


class Texts:
    """Plain decoding runs every prompt alone, from an empty prefix cache; the other engine alone, then all of a round at once."""

    def __init__(self, plain: LLM, fast: LLM, settings: Sequence[Mapping[str, Any]], seed: int) -> None:
        self.plain, self.fast, self.settings = plain, fast, settings
        self.tallies = [Tally(sampling, together) for sampling in settings for together in (False, True)]
        self.seeds = itertools.count(1000 * seed)
        self.rounds = 0

    def round(self, prompts: Sequence[list[int]], tokens: int) -> Iterator[list[int]]:
        """Compares answers of about so many tokens; yields prompt and answer of plain decoding as they come."""
        for sampling, alone, together in zip(self.settings, self.tallies[::2], self.tallies[1::2]):
            params = [self._params(i, tokens, sampling) for i in range(len(prompts))]
            said = []
            for prompt, p in zip(prompts, params):
                self.plain.engine.forget_prefixes()
                said += answers(self.plain, [prompt], [p])
                yield prompt + said[-1].token_ids
                alone.add(prompt, p, said[-1], *answers(self.fast, [prompt], [p]))
            if self.rounds % 2 == 0:
                self.fast.engine.forget_prefixes()  # every other round takes what the texts alone have left there
            for given in zip(prompts, params, said, answers(self.fast, prompts, params)):
                together.add(*given)
            together.joined += max(0, len(prompts) - self.fast.engine.options.max_num_seqs)
        self.rounds += 1

    def _params(self, i: int, tokens: int, sampling: Mapping[str, Any]) -> SamplingParams:
        """Of uneven lengths, so that texts end beside others that go on; every other one goes on past the end-of-sequence token."""
        most = max(1, tokens - i % 4 * tokens // 6)
        return SamplingParams(
            seed=next(self.seeds), max_tokens=most, ignore_eos=i % 2 == 1, logprobs=0, **sampling
        )


def answers(
    llm: LLM, prompts: Sequence[list[int]], params: Sequence[SamplingParams]
) -> list[CompletionOutput]:
    """Raises the error of a prompt that was not answered."""
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params)
    for output in outputs:
        if output.error is not None:
            raise output.error
    return [output.outputs[0] for output in outputs]
