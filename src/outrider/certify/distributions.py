"""Test of the distribution of sampled texts: many seeds of a few prompts, with speculation and without."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from outrider.certify.chi_square import ChiSquareResult, combine, compare
from outrider.core.params import SamplingParams
from outrider.llm import LLM

TEMPERATURES = (0.7, 1.0)
COMPARED_TOKENS = 3  # whose joint distribution is tested
MAX_TOKENS = 16  # of a text: more than compared, so that a drafter may draft deeper
FALSE_ALARM = 0.001  # probability that a correct engine fails, all tests together
CANDIDATES, PILOT_TEXTS, CHOSEN = 6, 16, 3  # prompts tried, texts for each of them, prompts tested

Beginning = tuple[int, ...]


@dataclass
class Samples:
    """First tokens of the texts of one prompt at one temperature, by engine."""

    prompt: list[int]
    temperature: float
    plain: Counter[Beginning] = field(default_factory=Counter)
    speculative: Counter[Beginning] = field(default_factory=Counter)


class DistributionTest:
    """The two engines use different seeds, so that their samples are independent."""

    def __init__(self, plain: LLM, speculative: LLM, prompts: Sequence[list[int]], seed: int) -> None:
        self.plain, self.speculative, self.seed = plain, speculative, 1_000_000 * (2 * seed + 1)
        chosen = self._choose_prompts(prompts)
        self.cases = [Samples(prompt, temperature) for prompt in chosen for temperature in TEMPERATURES]

    @property
    def level(self) -> float:
        """False alarm probability of one test: Bonferroni's share, counting the combined test."""
        return FALSE_ALARM / (len(self.cases) + 1)

    @property
    def samples_per_case(self) -> int:
        """Texts of each engine, in the case that has the fewest."""
        return min(case.speculative.total() for case in self.cases)

    @property
    def num_samples(self) -> int:
        return sum(case.plain.total() + case.speculative.total() for case in self.cases)

    def results(self) -> list[ChiSquareResult]:
        """One result per case, and the combined one last."""
        results = [compare(case.plain, case.speculative, self.level) for case in self.cases]
        first = self.cases[0]
        return [*results, combine(results, first.plain.total(), first.speculative.total(), self.level)]

    def round(self, count: int) -> Iterator[None]:
        """Sample `count` more texts of every case from each engine."""
        for case in self.cases:
            for llm, counter in ((self.plain, case.plain), (self.speculative, case.speculative)):
                counter.update(sample_beginnings(llm, case.prompt, case.temperature, self._seeds(count)))
                yield

    def _seeds(self, count: int) -> range:
        self.seed += count
        return range(self.seed - count, self.seed)

    def _choose_prompts(self, prompts: Sequence[list[int]]) -> list[list[int]]:
        """The prompts whose texts are moderately varied.

        Nearly constant texts reveal no deviation, and nearly all different ones take too many samples.
        """
        temperature = max(TEMPERATURES)
        distinct = [
            len(set(sample_beginnings(self.plain, ids, temperature, self._seeds(PILOT_TEXTS))))
            for ids in prompts
        ]
        order = sorted(range(len(prompts)), key=lambda i: abs(distinct[i] - PILOT_TEXTS / 2))
        return [prompts[i] for i in sorted(order[:CHOSEN])]


def sample_beginnings(llm: LLM, prompt: list[int], temperature: float, seeds: range) -> list[Beginning]:
    """The first tokens for each seed; a text is aborted once it has them."""
    params = [
        SamplingParams(temperature=temperature, seed=seed, max_tokens=MAX_TOKENS, detokenize=False)
        for seed in seeds
    ]
    found = []
    for output in llm.stream([{"prompt_token_ids": prompt}] * len(params), params):
        if output.error is not None:
            raise output.error
        if output.finished:
            found.append(tuple(output.outputs[0].token_ids[:COMPARED_TOKENS]))
        elif len(output.outputs[0].token_ids) >= COMPARED_TOKENS:
            llm.abort(output.request_id)
    return found
