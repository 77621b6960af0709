"""`outrider tune`: search methods and their parameters on real runs.

1. Every method answers a prompt with its own defaults.
2. Optuna's TPE sampler proposes a method and parameters.  A proposal answers 1, 3, then 9 prompts, as long as
   it is among the best of those that answered as many: successive halving that does not wait for complete
   rounds (arXiv 1810.05934).
3. The best FINALISTS answer prompts until the time is over; these answers alone count for the ranking.

A setting runs in turn with plain decoding, so that a slow moment of the machine falls on both.  A gain is
plain seconds / its seconds over the same answers; its interval is a bootstrap over the pairs.
"""

from __future__ import annotations

import copy
import itertools
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, NamedTuple

import numpy as np

from outrider.bench.measure import Prompts, Run, once
from outrider.core.params import SamplingParams
from outrider.draft import PLAIN_MODEL, detect, method, methods
from outrider.errors import CapacityError, ConfigError, ModelError
from outrider.llm import LLM
from outrider.tune.layerskip import import_optuna

MOST = 9  # prompts of a proposal
RUNGS = (1, 3)  # prompts after which it has to be one of the best
KEEP = 3  # one in KEEP is promoted
FINALISTS = 3
SEARCH_SHARE = 0.7  # of the time; the rest is for the finalists
RESAMPLES, LEVEL, LEAST = 2000, 95, 3  # of the bootstrap; per cent of the interval; pairs that make one
OFF = {"method": "off"}
Tick = Callable[[str], None]


class Pair(NamedTuple):
    """Seconds that plain decoding and a setting took for one prompt."""

    plain: float
    own: float


@dataclass
class Candidate:
    """A setting, and its runs, one for each prompt."""

    label: str
    config: Mapping[str, Any]
    pairs: list[Pair] = field(default_factory=list)
    changed: bool = False  # it emitted other tokens than plain decoding although it promises the same

    @property
    def gain(self) -> float:
        return self.gain_over(len(self.pairs))

    def gain_over(self, count: int) -> float:
        """The gain over its first prompts."""
        pairs = self.pairs[:count]
        return sum(pair.plain for pair in pairs) / sum(pair.own for pair in pairs)

    @property
    def interval(self) -> tuple[float, float] | None:
        """The gain's confidence interval; None for too few pairs."""
        if len(self.pairs) < LEAST:
            return None
        pairs = np.array(self.pairs)
        chosen = np.random.default_rng(0).integers(len(pairs), size=(RESAMPLES, len(pairs)))
        sums = pairs[chosen].sum(1)
        low, high = np.percentile(sums[:, 0] / sums[:, 1], [50 - LEVEL / 2, 50 + LEVEL / 2])
        return float(low), float(high)


@dataclass(frozen=True)
class Space:
    """A method, and the values that its parameters are tried with.  ahead: a method that drafts first."""

    label: str
    config: Mapping[str, Any]
    tunable: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    ahead: str | None = None

    @property
    def parameters(self) -> dict[str, Sequence[Any]]:
        """`tunable` under names that no other space has."""
        return {f"{self.label}/{name}": values for name, values in self.tunable.items()}

    def candidate(self, chosen: Mapping[str, Any]) -> Candidate:
        """chosen: value of each parameter; None for the method's own default."""
        given = {name: value for name, value in chosen.items() if value is not None}
        config = {**self.config, **given}
        if self.ahead is not None:
            config = {"method": "first", "drafters": [{"method": self.ahead}, config]}
        label = ", ".join([self.label, *(f"{_short(name)} {value}" for name, value in given.items())])
        return Candidate(label, config)


def _short(name: str) -> str:
    """The name of a parameter in a label."""
    return "depth" if name == "num_speculative_tokens" else name.removeprefix("suffix_decoding_")


def spaces(drafts: Sequence[str]) -> list[Space]:
    """The methods without weights, every draft and head, and these mixed with look-up."""
    found = [Space("auto", {"method": "auto"})]
    for name, kind in methods().items():
        if kind.tunable and not any(option.name == "model" for option in fields(kind.Options)):
            found.append(Space(name, {"method": name}, kind.tunable))
    for name in drafts:
        own = detect(name)
        config, tunable = {"method": own, "model": name}, method(own).tunable
        found += [Space(f"auto, {name}", {**config, "method": "auto"}), Space(name, config, tunable)]
        if own == PLAIN_MODEL:
            found.append(Space(f"suffix else {name}", config, tunable, ahead="suffix"))
    return found


@dataclass(frozen=True)
class Outcome:
    """ranking: those that reached the final, the best first.  dropped: the others, by their last gain.

    untried: methods that the time did not suffice for.  refused: settings that this model does not support.
    interrupted: whether Ctrl-C ended the search.
    """

    ranking: list[Candidate]
    dropped: list[Candidate]
    untried: list[str]
    refused: dict[str, str]
    interrupted: bool = False

    @property
    def changed(self) -> list[Candidate]:
        """Settings that emitted other tokens than plain decoding although they promise the same."""
        return [one for one in (*self.ranking, *self.dropped) if one.changed]

    @property
    def config(self) -> Mapping[str, Any]:
        """The setting to use: the best one, or none where it measured slower than plain decoding."""
        return self.ranking[0].config if self.ranking and self.ranking[0].gain > 1 else OFF


class Loaded(NamedTuple):
    """A candidate's engine, and its drafter's memory before any prompt."""

    llm: LLM
    fresh: Any


@dataclass
class Search:
    """minutes: of the whole search.  clock: seconds, replaced in tests.

    tried: label -> candidate.  engines: of the last candidates.  interrupted: by Ctrl-C.
    """

    llm: LLM
    prompts: Prompts
    params: SamplingParams
    minutes: float
    clock: Callable[[], float] = time.monotonic
    tried: dict[str, Candidate] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)
    engines: dict[str, Loaded] = field(default_factory=dict)
    interrupted: bool = False

    def __post_init__(self) -> None:
        self.plain = self.llm.variant(None)
        self.prompts = random.Random(0).sample(self.prompts, len(self.prompts))  # they may be sorted by kind

    def run(self, asked: Sequence[Space], tick: Tick) -> Outcome:
        """Ctrl-C ends it with what is measured so far.

        Raises ConfigError if there is no time for a single run, or no setting is supported.
        """
        began, seconds = self.clock(), 60 * self.minutes
        self._once(self.plain, *self._prompt(0))  # warm up
        try:
            self._propose(asked, began + SEARCH_SHARE * seconds, tick)
        except KeyboardInterrupt:
            if not self._best():
                raise
            self.interrupted = True
        found = self._best()
        if not found:
            reasons = "".join(f" {label}: {reason}" for label, reason in self.refused.items())
            few = f"{self.minutes:g} minutes do not suffice for one run: give more --minutes."
            raise ConfigError(f"this model supports none of the settings.{reasons}" if reasons else few)
        finalists = [one for one in found if len(one.pairs) >= LEAST][:FINALISTS] or found[:FINALISTS]
        ranking = self._final(finalists, began + seconds, tick)
        dropped = [one for one in found if one not in finalists]
        defaults = [space.candidate({}).label for space in asked]
        untried = [label for label in defaults if not self._ran(label) and label not in self.refused]
        return Outcome(ranking, dropped, untried, self.refused, self.interrupted)

    def _ran(self, label: str) -> bool:
        return label in self.tried and bool(self.tried[label].pairs)

    def _best(self) -> list[Candidate]:
        """The candidates that ran, those with the most gain first."""
        return sorted((one for one in self.tried.values() if one.pairs), key=lambda one: -one.gain)

    def _promoted(self, count: int) -> list[Candidate]:
        """The candidates to run on more than `count` prompts: the best of those that answered as many."""
        rivals = [one for one in self.tried.values() if len(one.pairs) >= count]
        rivals.sort(key=lambda one: -one.gain_over(count))
        return rivals[: max(1, len(rivals) // KEEP)]

    def _propose(self, asked: Sequence[Space], until: float, tick: Tick) -> None:
        """Try every method with its defaults, the best of them again, then what the sampler proposes."""
        optuna, by_label = import_optuna(), {space.label: space for space in asked}
        sampler = optuna.samplers.TPESampler(
            n_startup_trials=len(asked), seed=self.params.seed, multivariate=True, group=True
        )
        study = optuna.create_study(direction="maximize", sampler=sampler)
        for space in asked:
            study.enqueue_trial({"method": space.label, **dict.fromkeys(space.parameters)})
            self._candidate(space, {})

        def propose(number: int, most: int) -> None:
            trial = study.ask()
            space = by_label[trial.suggest_categorical("method", [*by_label])]
            values = dict[str, Any]()
            for name, unique_name in zip(space.tunable, space.parameters):
                values[name] = trial.suggest_categorical(unique_name, [None, *space.tunable[name]])
            candidate = self._candidate(space, values)
            tick(f"{number}: {candidate.label}")
            self._try(candidate, until, most)
            study.tell(trial, candidate.gain if candidate.pairs else 0.0)

        for number in range(1, len(asked) + 1):  # the enqueued trials come first
            if self.clock() >= until:
                return
            propose(number, 1)
        for candidate in self._promoted(1):
            self._try(candidate, until, LEAST)
        for number in itertools.count(len(asked) + 1):
            if self.clock() >= until or not self._best():
                return
            propose(number, MOST)

    def _candidate(self, space: Space, values: Mapping[str, Any]) -> Candidate:
        made = space.candidate(values)
        return self.tried.setdefault(made.label, made)

    def _try(self, candidate: Candidate, until: float, most: int = MOST) -> None:
        """Run a candidate over a prompt, and over `most` in all as long as it is one of the best."""
        while candidate.label not in self.refused and self.clock() < until and self._visit(candidate):
            count = len(candidate.pairs)
            if count >= most or (count in RUNGS and candidate not in self._promoted(count)):
                return

    def _final(self, finalists: Sequence[Candidate], end: float, tick: Tick) -> list[Candidate]:
        """Measure the finalists anew: they were chosen for their gains so far, which flatter them.

        Those runs count only where there is no time for enough others.
        """
        found = [replace(one, pairs=[]) for one in finalists]
        try:
            while self.clock() < end and not self.interrupted:
                for one in found:
                    tick(f"final: {one.label}")
                    if self.clock() < end:
                        self._visit(one)
        except KeyboardInterrupt:
            self.interrupted = True
        for one, before in zip(found, finalists):
            one.pairs += before.pairs if len(one.pairs) < LEAST else []
        return sorted(found, key=lambda one: -one.gain)

    def _visit(self, candidate: Candidate) -> bool:
        """One prompt with a candidate and plainly, in alternating order.  False if it is not supported.

        A drafter keeps what it learned from other prompts, until a further pass over all of them.
        """
        number = len(candidate.pairs)
        kind, group = self._prompt(number)
        try:
            own, fresh = self._engine(candidate)
        except (ConfigError, ModelError, CapacityError) as error:
            self.refused[candidate.label] = str(error)
            return False
        if not number % len(self.prompts):
            own.engine.drafter.memory = fresh
        order = (self.plain, own) if number % 2 else (own, self.plain)
        runs = {llm: self._once(llm, kind, group) for llm in order}
        same = runs[self.plain].tokens == runs[own].tokens
        candidate.changed |= own.engine.rule.keeps_tokens and own.engine.exact and not same
        candidate.pairs.append(Pair(runs[self.plain].seconds, runs[own].seconds))
        return True

    def _engine(self, candidate: Candidate) -> Loaded:
        if candidate.label not in self.engines:
            made = self.llm.variant(candidate.config)
            fresh = copy.deepcopy(made.engine.drafter.memory)
            self._once(made, *self._prompt(0))  # its weights and caches are cold
            made.engine.drafter.memory = fresh
            self.engines[candidate.label] = Loaded(made, fresh)
            while len(self.engines) > FINALISTS:
                del self.engines[next(iter(self.engines))]
        return self.engines[candidate.label]

    def _once(self, llm: LLM, kind: str, group: list[Any]) -> Run:
        return once(llm, kind, group, self.params, llm.engine.drafter.memory)

    def _prompt(self, number: int) -> tuple[str, list[Any]]:
        kind, prompt = self.prompts[number % len(self.prompts)]
        return kind, [prompt]
