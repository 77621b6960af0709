"""The law of sampled texts: many seeds of a few prompts, speculatively and plainly, and whether their first tokens have one law."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from outrider.certify.chances import Chance, combined, compare
from outrider.core.params import SamplingParams
from outrider.llm import LLM

TEMPERATURES = (0.7, 1.0)
FIRST = 3  # tokens whose joint law is compared
ALARM = 0.001  # the chance that a healthy engine fails, all tests together
LONGEST = 16  # tokens that a text may have: a drafter guesses deeper than what is compared
CANDIDATES, PILOT, CHOSEN = 6, 16, 3  # prompts that are tried, with how many texts, and those that are tested

Start = tuple[int, ...]


@dataclass
class Sampled:
    """The first tokens of texts of one prompt."""

    prompt: list[int]
    temperature: float
    plain: Counter[Start] = field(default_factory=Counter)
    fast: Counter[Start] = field(default_factory=Counter)


class LawTest:
    """Both engines draw from seeds of their own, so that the lots are independent."""

    def __init__(self, plain: LLM, fast: LLM, prompts: Sequence[list[int]], seed: int) -> None:
        self.plain, self.fast, self.seed = plain, fast, 1_000_000 * (2 * seed + 1)
        self.cells = [
            Sampled(prompt, temperature) for prompt in self._varied(prompts) for temperature in TEMPERATURES
        ]

    @property
    def level(self) -> float:
        """Of one test: Bonferroni's share of the alarm, with one for all of them as one."""
        return ALARM / (len(self.cells) + 1)

    @property
    def each(self) -> int:
        """Samples of each lot, as far as all have them."""
        return min(cell.fast.total() for cell in self.cells)

    @property
    def samples(self) -> int:
        return sum(cell.plain.total() + cell.fast.total() for cell in self.cells)

    def chances(self) -> list[Chance]:
        """Of every prompt and temperature, and last of all of them as one."""
        found = [compare(cell.plain, cell.fast, self.level) for cell in self.cells]
        return [*found, combined(found, self.cells[0].plain.total(), self.cells[0].fast.total(), self.level)]

    def round(self, count: int) -> Iterator[None]:
        """So many texts more of every prompt and temperature, in each lot."""
        for cell in self.cells:
            for llm, stream_id in ((self.plain, cell.plain), (self.fast, cell.fast)):
                stream_id.update(starts(llm, cell.prompt, cell.temperature, self._seeds(count)))
                yield

    def _seeds(self, count: int) -> range:
        self.seed += count
        return range(self.seed - count, self.seed)

    def _varied(self, prompts: Sequence[list[int]]) -> list[list[int]]:
        """Those after which the model says different things, some of them often: elsewhere every law looks alike, or takes too many
        samples to be told from another."""
        said = [len(set(starts(self.plain, ids, max(TEMPERATURES), self._seeds(PILOT)))) for ids in prompts]
        order = sorted(range(len(prompts)), key=lambda i: abs(said[i] - PILOT / 2))
        return [prompts[i] for i in sorted(order[:CHOSEN])]


def starts(llm: LLM, prompt: list[int], temperature: float, seeds: range) -> list[Start]:
    """The first tokens for each seed; what would come after them is not computed."""
    params = [
        SamplingParams(temperature=temperature, seed=seed, max_tokens=LONGEST, detokenize=False)
        for seed in seeds
    ]
    found = []
    for output in llm.stream([{"prompt_token_ids": prompt}] * len(params), params):
        if output.error is not None:
            raise output.error
        if output.finished:
            found.append(tuple(output.outputs[0].token_ids[:FIRST]))
        elif len(output.outputs[0].token_ids) >= FIRST:
            llm.abort(output.request_id)
    return found
