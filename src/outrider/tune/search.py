"""`outrider tune`: search methods and parameters by successive halving on real runs.

Every candidate answers a few prompts, each in turn with plain decoding, so that a slow moment of the machine
falls on both.  The best third answers three times as many, and so on; the last FINALISTS are measured until
the time is over.  A gain is plain seconds / candidate's seconds over the same answers; its interval is a
bootstrap over the pairs.
"""

from __future__ import annotations

import copy
import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from outrider.bench.measure import Prompts, once
from outrider.core.params import SamplingParams
from outrider.draft import PLAIN_MODEL, detect
from outrider.errors import CapacityError, ConfigError, ModelError
from outrider.llm import LLM

DEPTHS = (2, 3, 4, 6, 8)
KEEP = 3  # one in KEEP survives, on KEEP times as many prompts
FINALISTS = 3
SEARCH_SHARE = 0.7  # of the time; the rest is for the finalists
RESAMPLES, LEVEL = 2000, 95  # of the bootstrap; per cent of the interval
OFF = {"method": "off"}
Tick = Callable[[str], None]


@dataclass
class Candidate:
    """A setting, and its runs: (seconds of plain decoding, seconds of the setting) of one prompt each."""

    label: str
    config: Mapping[str, Any]
    pairs: list[tuple[float, float]] = field(default_factory=list)
    changed: bool = False  # it emitted other tokens than plain decoding although it promises the same

    @property
    def gain(self) -> float:
        plain, own = map(sum, zip(*self.pairs))
        return float(plain / own)

    @property
    def interval(self) -> tuple[float, float]:
        """The gain's confidence interval."""
        pairs = np.array(self.pairs)
        chosen = np.random.default_rng(0).integers(len(pairs), size=(RESAMPLES, len(pairs)))
        sums = pairs[chosen].sum(1)
        low, high = np.percentile(sums[:, 0] / sums[:, 1], [50 - LEVEL / 2, 50 + LEVEL / 2])
        return float(low), float(high)


@dataclass(frozen=True)
class Outcome:
    """ranking: those that reached the final, the best first.  dropped: the others, by their last gain.

    untried: settings that the time did not suffice for.  refused: those that this model does not support.
    """

    ranking: list[Candidate]
    dropped: list[Candidate]
    untried: list[str]
    refused: dict[str, str]

    @property
    def config(self) -> Mapping[str, Any]:
        """The setting to use: the best one, or none where it measured slower than plain decoding."""
        return self.ranking[0].config if self.ranking and self.ranking[0].gain > 1 else OFF


def candidates(drafts: Sequence[str]) -> list[Candidate]:
    """Settings of the methods without weights, of every draft and head, and of mixes with look-up."""
    return [Candidate(label, config) for label, config in _settings(drafts)]


def _settings(drafts: Sequence[str]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    yield "auto", {"method": "auto"}
    for depth in DEPTHS[1:]:
        yield f"ngram, {depth}", {"method": "ngram", "num_speculative_tokens": depth}
    for factor, least in itertools.product((1.0, 2.0), (0.1, 0.4)):
        keys = {"suffix_decoding_max_spec_factor": factor, "suffix_decoding_min_token_prob": least}
        yield f"suffix, factor {factor:g}, p {least:g}", {"method": "suffix", **keys}
    yield "recycle", {"method": "recycle"}
    for name in drafts:
        method = detect(name)
        for depth in DEPTHS:
            config = {"method": method, "model": name, "num_speculative_tokens": depth}
            yield f"{name}, {depth}", config
            if method == PLAIN_MODEL:
                if depth <= 4:
                    yield f"{name}, {depth} × 2", {**config, "siblings": 2}
                mixed = {"method": "first", "drafters": [{"method": "suffix"}, config]}
                yield f"suffix else {name}, {depth}", mixed


@dataclass
class Search:
    """minutes: of the whole search.  clock: seconds, replaced in tests."""

    llm: LLM
    prompts: Prompts
    params: SamplingParams
    minutes: float
    clock: Callable[[], float] = time.monotonic

    def run(self, settings: list[Candidate], tick: Tick) -> Outcome:
        """Raises ConfigError if there is no time for a single run."""
        began = self.clock()
        self.end = began + 60 * self.minutes
        self.plain = self.llm.variant(None)
        self.variants: dict[str, LLM] = {}
        self.fresh: dict[str, Any] = {}  # memory of each candidate's drafter before its first prompt
        self.refused: dict[str, str] = {}
        once(self.plain, *self._prompt(0), self.params)  # warm up
        rungs = max(1, round(np.log(max(1, len(settings) / FINALISTS)) / np.log(KEEP)))
        alive, dropped, count = settings, list[Candidate](), 1
        untried: list[str] = []
        for rung in range(1, rungs + 1):
            until = began + 60 * self.minutes * SEARCH_SHARE * rung / rungs
            for candidate in alive:
                tick(f"round {rung} of {rungs}: {candidate.label}")
                self._visit(candidate, count, until)
            untried += [one.label for one in alive if not one.pairs and one.label not in self.refused]
            ranked = sorted((one for one in alive if one.pairs), key=lambda one: -one.gain)
            left = max(FINALISTS, len(alive) // KEEP) if rung < rungs else FINALISTS
            alive, dropped, count = ranked[:left], ranked[left:] + dropped, count * KEEP
            self.variants = {
                one.label: self.variants[one.label] for one in alive if one.label in self.variants
            }
        if not alive:
            raise ConfigError(f"{self.minutes:g} minutes do not suffice for one run: give more --minutes.")
        self._final(alive, count, tick)
        return Outcome(sorted(alive, key=lambda one: -one.gain), dropped, untried, self.refused)

    def _visit(self, candidate: Candidate, count: int, until: float) -> None:
        """Run a candidate over the next `count` prompts; stops when the time `until` is over."""
        try:
            variant = self.variants.get(candidate.label) or self.llm.variant(candidate.config)
        except (ConfigError, ModelError, CapacityError) as error:
            self.refused[candidate.label] = str(error)
            return
        self.variants[candidate.label] = variant
        for _ in range(count):
            if self.clock() >= until:
                return
            self._pair(candidate, variant)

    def _final(self, alive: Sequence[Candidate], count: int, tick: Tick) -> None:
        while self.clock() < self.end:
            for candidate in alive:
                tick(f"final: {candidate.label}")
                self._visit(candidate, 1, self.end)

    def _pair(self, candidate: Candidate, variant: LLM) -> None:
        """One prompt with both, in alternating order.

        A drafter keeps what it learned from other prompts, until a further pass over all of them.
        """
        number, drafter = len(candidate.pairs), variant.engine.drafter
        kind, group = self._prompt(number)
        if candidate.label not in self.fresh:
            self.fresh[candidate.label] = copy.deepcopy(drafter.memory)
        if not number:  # its weights and caches are cold
            self._once(variant, kind, group)
        if not number % len(self.prompts):
            drafter.memory = self.fresh[candidate.label]
        order = (self.plain, variant) if number % 2 else (variant, self.plain)
        runs = {id(llm): self._once(llm, kind, group) for llm in order}
        plain, own = runs[id(self.plain)], runs[id(variant)]
        same = [a.token_ids for a in plain.answers] == [a.token_ids for a in own.answers]
        candidate.changed |= variant.engine.rule.same and variant.engine.exact and not same
        candidate.pairs.append((plain.seconds, own.seconds))

    def _once(self, llm: LLM, kind: str, group: list[Any]) -> Any:
        return once(llm, kind, group, self.params, llm.engine.drafter.memory)

    def _prompt(self, number: int) -> tuple[str, list[Any]]:
        kind, prompt = self.prompts[number % len(self.prompts)]
        return kind, [prompt]
