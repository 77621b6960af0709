"""Measurement of methods beside each other: the same prompts and seeds, in interleaved rounds."""

from __future__ import annotations

import math
import operator
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from outrider.bench.measure import Attempt, Configs, Measured, Prompts, Run, Stopped, grouped, once
from outrider.core.params import SamplingParams
from outrider.llm import LLM

_seconds = operator.attrgetter("seconds")  # of a run
Round = dict[tuple[str, int], Run]  # (label, number of the group) -> its best run


@dataclass(frozen=True)
class Rounds:
    """Number and size of the rounds of a measurement.

    repeats:    rounds at most; the best one counts
    batch_size: prompts of a kind that are answered at once, a group
    runs:       runs of a method for each group and round; the best one counts, because a method that runs
                after one with weights of its own finds cold caches
    seconds:    a second round begins only within this time after the start, a further one only if it is
                expected to end by then
    fresh:      every round allocates new caches, because their addresses change the time of a step by some
                per cent
    """

    repeats: int = 1
    batch_size: int = 1
    runs: int = 2
    seconds: float = math.inf
    fresh: bool = True


class Interrupted(KeyboardInterrupt):
    """Ctrl-C after something was measured.

    results: of the rounds that are complete; if none is, of the groups that all methods have answered.
    """

    def __init__(self, results: list[Measured]) -> None:
        super().__init__()
        self.results = results


def measure(
    llm: LLM,
    configs: Configs,
    prompts: Prompts,
    params: SamplingParams,
    rounds: Rounds = Rounds(),
    tick: Callable[[str], None] = lambda label: None,
    others: Mapping[str, Attempt] | None = None,
) -> list[Measured]:
    """Run every config over every (kind, prompt).

    - Methods alternate within each group, in rotating order.  So a temporary slowdown affects all of them.
    - A method keeps what it learned from earlier groups of a round, but not from its own previous run of a
      group.

    tick: called with the label of a method after each group.
    others: other engines by label, which take turns with the configs until they raise Stopped.

    Returns the best of all rounds, and the seconds of each; at the end the engines that were stopped, without
    runs.  Raises Interrupted.
    """
    measurement = _Measurement(llm, configs, grouped(prompts, rounds.batch_size), params, rounds, tick)
    return measurement.results(others or {})


class _Peers:
    """Other engines that are measured, and why the others of them were stopped."""

    def __init__(self, attempts: Mapping[str, Attempt]) -> None:
        self.attempts, self.stopped = dict(attempts), dict[str, str]()

    def run(self, label: str, kind: str, group: list[Any], runs: int) -> Run | None:
        """The best of so many runs; None, from now on, if the engine was stopped."""
        try:
            return min((self.attempts[label](kind, group) for _ in range(runs)), key=_seconds)
        except Stopped as error:
            del self.attempts[label]
            self.stopped[label] = str(error)
            return None


@dataclass
class _Measurement:
    """A measurement in progress.

    variants: engines by label.  memories: of their drafters, at the beginning of each round.
    """

    llm: LLM
    configs: Configs
    groups: Sequence[tuple[str, list[Any]]]
    params: SamplingParams
    rounds: Rounds
    tick: Callable[[str], None]
    variants: dict[str, LLM] = field(default_factory=dict)
    memories: dict[str, Any] = field(default_factory=dict)

    def results(self, others: Mapping[str, Attempt]) -> list[Measured]:
        """Run all rounds."""
        peers, found = _Peers(others), list[Round]()
        try:
            self._run(peers, found)
        except KeyboardInterrupt:
            if not (kept := self._kept(peers, found)):
                raise
            raise Interrupted(self._measured(peers, kept)) from None
        return self._measured(peers, found)

    def _run(self, peers: _Peers, found: list[Round]) -> None:
        """Add the runs of each round."""
        began = time.monotonic()
        for label in [*peers.attempts]:
            peers.run(label, *self.groups[0], 1)  # warm up
        while len(found) < self.rounds.repeats:
            spent = time.monotonic() - began
            next_round = spent / len(found) if len(found) > 1 else 0.0
            if found and spent + next_round > self.rounds.seconds:
                break
            if self.rounds.fresh or not found:
                self._prepare()
            for label, variant in self.variants.items():
                variant.engine.drafter.memory = self.memories[label]
            found.append({})
            self._round(len(found) - 1, peers, found[-1])

    def _kept(self, peers: _Peers, found: list[Round]) -> list[Round]:
        """The rounds that can be compared if the last one is not complete."""
        if not found:
            return []
        labels, last = [*self.variants, *peers.attempts], found[-1]
        answered = [i for i in range(len(self.groups)) if all((label, i) in last for label in labels)]
        if len(found) > 1:
            return found if len(answered) == len(self.groups) else found[:-1]
        kept = {(label, i): last[label, i] for i in answered for label in labels}
        return [kept] if kept else []

    def _measured(self, peers: _Peers, found: list[Round]) -> list[Measured]:
        promises = {label: variant.engine.rule.promise for label, variant in self.variants.items()}
        results = _results(found, {**promises, **dict.fromkeys(peers.attempts, "")})
        return results + [Measured(label, [], "", why) for label, why in peers.stopped.items()]

    def _prepare(self) -> None:
        """Make the engines, with new caches, and warm them up."""
        self.variants = {label: self.llm.variant(config) for label, config in self.configs.items()}
        self.memories = {label: variant.engine.drafter.memory for label, variant in self.variants.items()}
        for label, variant in self.variants.items():
            once(variant, *self.groups[0], self.params, self.memories[label])

    def _round(self, number: int, peers: _Peers, best: Round) -> None:
        """Add the runs of round `number` to `best`."""
        for i, (kind, group) in enumerate(self.groups):
            order = [*self.variants, *peers.attempts]
            first = (i + number) % len(order)
            for label in order[first:] + order[:first]:
                if label in self.variants:
                    best[label, i] = self._best_run(self.variants[label], kind, group)
                elif (run := peers.run(label, kind, group, self.rounds.runs)) is not None:
                    best[label, i] = run
                self.tick(label)
        for variant in self.variants.values():
            variant.engine.check()

    def _best_run(self, variant: LLM, kind: str, group: list[Any]) -> Run:
        memory = variant.engine.drafter.memory  # all runs start from what the drafter knows now
        attempts = (once(variant, kind, group, self.params, memory) for _ in range(self.rounds.runs))
        return min(attempts, key=_seconds)


def _results(rounds: Sequence[Round], promises: Mapping[str, str]) -> list[Measured]:
    """The best run of each group, with the seconds of every round."""
    results = {label: Measured(label, [], promise) for label, promise in promises.items()}
    for label, group in rounds[0]:
        if label in results:
            runs = [found[label, group] for found in rounds]
            best = min(runs, key=_seconds)
            best.turns = [run.seconds for run in runs]
            results[label].runs.append(best)
    return list(results.values())
