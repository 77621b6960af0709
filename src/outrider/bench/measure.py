"""Results of a comparison of methods with plain decoding: speed and equal tokens."""

from __future__ import annotations

import copy
import itertools
import math
import statistics
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from outrider import draft
from outrider.core.clock import Times
from outrider.core.params import SamplingParams
from outrider.core.row import Speculation
from outrider.llm import LLM
from outrider.outputs import CompletionOutput, RequestOutput

PLAIN, ALL = "plain decoding", "all"
TOLERANCE = 1.01  # of a speed-up above the limit
Configs = Mapping[str, Mapping[str, Any] | None]  # label -> speculative_config
Prompts = Sequence[tuple[str, Any]]  # (kind, prompt for LLM.generate)
Attempt = Callable[[str, list[Any]], "Run"]  # answers a group of a kind once


class Stopped(Exception):
    """Another engine took too long and was stopped.  Its message is for the row of the engine."""


@dataclass
class Run:
    """Requests of one kind, run as one batch.

    seconds: wall clock, prefill included
    times:   the engine's clock
    turns:   seconds of each repeat, if there are several
    """

    kind: str
    seconds: float
    times: Times
    answers: list[CompletionOutput]
    turns: list[float] = field(default_factory=list)

    @property
    def median(self) -> float:
        return float(statistics.median(self.turns or [self.seconds]))

    @property
    def tokens(self) -> list[list[int]]:
        """New tokens of each answer."""
        return [answer.token_ids for answer in self.answers]

    @property
    def tokens_per_step(self) -> float:
        """Tokens per step of the best answer; infinite for another engine, whose steps are not known."""
        return max((a.speculation.tokens_per_step or math.inf for a in self.answers), default=math.inf)


@dataclass
class Measured:
    """Results of one method over all prompts.

    Tokens are new tokens.  Times count from the submission of a batch.
    promise: what must equal plain decoding's: "tokens" or "distribution"; "lossy" if nothing must, "" for
        another engine
    stopped: why there are no runs, of another engine that took too long
    """

    method: str
    runs: list[Run] = field(default_factory=list)
    promise: str = "tokens"
    stopped: str = ""

    def only(self, kind: str) -> Measured:
        """The results of one kind; all of them for ALL."""
        if kind == ALL:
            return self
        return replace(self, runs=[run for run in self.runs if run.kind == kind])

    def differs(self, plain: Measured) -> bool:
        """Whether it emitted other tokens than plain decoding although it promises the same tokens."""
        return self.promise == "tokens" and self.tokens != plain.tokens

    @property
    def kinds(self) -> list[str]:
        return list(dict.fromkeys(run.kind for run in self.runs))

    @property
    def tasks(self) -> list[str]:
        """The kinds, then ALL, which is the kind of prompts without a category."""
        return [*(kind for kind in self.kinds if kind != ALL), ALL]

    @property
    def answers(self) -> list[CompletionOutput]:
        return [answer for run in self.runs for answer in run.answers]

    @property
    def tokens(self) -> list[list[int]]:
        return [tokens for run in self.runs for tokens in run.tokens]

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.tokens))

    @property
    def speed(self) -> float:
        """New tokens per second, in the median of the repeats."""
        return self.num_tokens / sum(run.median for run in self.runs)

    def speed_ups(self, plain: Measured) -> list[float]:
        """Speed-up over plain decoding in each repeat, or of the best times if there are no repeats."""
        repeats = min((len(run.turns) for run in (*self.runs, *plain.runs)), default=0)
        if not repeats:
            return [self.speed / plain.speed]
        gains, ratio = list[float](), self.num_tokens / plain.num_tokens
        for i in range(repeats):
            ours, theirs = (sum(run.turns[i] for run in result.runs) for result in (self, plain))
            gains.append(ratio * theirs / ours)
        return gains

    def speed_up(self, plain: Measured) -> float:
        """Median speed-up of the repeats; the clock rate of a machine varies."""
        return float(statistics.median(self.speed_ups(plain)))

    def noise(self, plain: Measured) -> float | None:
        """Half the range of the repeats' speed-ups; None for a single repeat."""
        gains = self.speed_ups(plain)
        return (max(gains) - min(gains)) / 2 if len(gains) > 1 else None

    def limit(self, plain: Measured) -> float:
        """Largest possible speed-up: tokens per step, since no step is shorter than one of plain decoding."""
        plain_seconds = least_seconds = 0.0
        for ours, theirs in zip(self.runs, plain.runs):
            plain_seconds += theirs.median
            least_seconds += theirs.median / max(1.0, ours.tokens_per_step)
        if not least_seconds:
            return math.inf
        return self.num_tokens / (plain.num_tokens or 1) * plain_seconds / least_seconds

    def impossible(self, plain: Measured) -> bool:
        """Whether the measured speed-up exceeds the limit: the machine was busy while plain decoding ran."""
        return self is not plain and self.speed_up(plain) > TOLERANCE * self.limit(plain)

    def without(self, runs: Collection[int]) -> Measured:
        """The same results without the runs of these indices."""
        return replace(self, runs=[run for i, run in enumerate(self.runs) if i not in runs])

    @property
    def total(self) -> Speculation:
        return sum((answer.speculation for answer in self.answers), Speculation())

    @property
    def drafting(self) -> float:
        """Share of the engine's time spent on drafting."""
        return sum(run.times.propose for run in self.runs) / (sum(sum(run.times) for run in self.runs) or 1)

    def of_ideal(self, plain: Measured) -> float:
        """Part of the ideal speed-up that is reached; 0 for another engine, whose phases are not known.

        The ideal one is tokens per step / cost of drafting and verification over that of a plain forward.
        """
        return self.model_share / plain.model_share if plain.model_share else 0.0

    @property
    def model_share(self) -> float:
        """Share of the seconds spent on drafting and forwards."""
        spent = sum(run.times.propose + run.times.forward for run in self.runs)
        return spent / sum(run.seconds for run in self.runs)

    @property
    def repeated(self) -> float:
        """Share of 4-grams that occurred before in the same text.  Loops favour every method that copies."""
        texts = [[tuple(text[i : i + 4]) for i in range(len(text) - 3)] for text in self.tokens]
        return 1 - sum(len(set(grams)) for grams in texts) / max(1, sum(map(len, texts)))

    @property
    def first_token(self) -> list[float]:
        """Seconds to the first token of each answer."""
        return [answer.token_times[0] for answer in self.answers if answer.token_times]

    @property
    def stalls(self) -> list[float]:
        """Seconds between consecutive steps that emitted tokens, of all answers."""
        pairs = [pair for answer in self.answers for pair in itertools.pairwise(answer.token_times)]
        return [after - before for before, after in pairs if after > before]

    @property
    def per_token(self) -> list[float]:
        """Seconds per token after the first, of each answer with more than one."""
        times = [answer.token_times for answer in self.answers if len(answer.token_times) > 1]
        return [(t[-1] - t[0]) / (len(t) - 1) for t in times]


def too_short(results: Sequence[Measured]) -> set[int]:
    """Indices of the runs whose answers have at most one token.

    That token comes from prefill, without speculation.  Runs in which a method changed a token are excluded.
    """
    plain, *others = results
    found = set[int]()
    for i, run in enumerate(plain.runs):
        same = all(run.tokens == other.runs[i].tokens for other in others if other.promise == "tokens")
        if same and all(len(tokens) <= 1 for tokens in run.tokens):
            found.add(i)
    return found


def demonstrations() -> dict[str, Mapping[str, Any] | None]:
    """Label -> speculative_config of all demonstrations on the built-in pair, plain decoding first."""
    shown: dict[str, Mapping[str, Any] | None] = {PLAIN: None}
    for name, method in sorted(draft.methods().items()):
        for label, config in method.demo.items():
            shown[label] = {"method": name, **config}
    return shown


def grouped(prompts: Prompts, size: int) -> list[tuple[str, list[Any]]]:
    """The prompts of each kind, in groups of at most `size`."""
    by_kind: dict[str, list[Any]] = {}
    for kind, prompt in prompts:
        by_kind.setdefault(kind, []).append(prompt)
    groups: list[tuple[str, list[Any]]] = []
    for kind, members in by_kind.items():
        groups += [(kind, members[i : i + size]) for i in range(0, len(members), size)]
    return groups


def once(llm: LLM, kind: str, prompts: list[Any], params: SamplingParams, memory: Any = None) -> Run:
    """Run a group with an empty prefix cache and a copy of `memory` in the drafter.

    Raises the error of the first failed prompt.
    """
    llm.engine.forget_prefixes()
    llm.engine.drafter.memory = copy.deepcopy(memory)
    llm.engine.reset()
    began = time.perf_counter()
    outputs = llm.generate(prompts, params)
    seconds = time.perf_counter() - began
    return Run(kind, seconds, llm.engine.times, answers_of(outputs))


def answers_of(outputs: Sequence[RequestOutput]) -> list[CompletionOutput]:
    """The first answer to each prompt.  Raises the error of the first prompt that failed."""
    for output in outputs:
        if output.error is not None:
            raise output.error
    return [output.outputs[0] for output in outputs]
