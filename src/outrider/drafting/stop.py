"""When a draft model stops guessing: rules that look at what it has guessed so far, and at how earlier rounds went.

A rule judges a guess by its traits (its probability, the entropy of the law it came from …).  The guess stays; nothing is guessed
behind it.  Whether the target will accept it plays no part, so a rule may be used with every verification.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from outrider.core.row import Row
from outrider.core.step import Commit, RowStep
from outrider.core.stop_rule import NodeFeatures, StopRule
from outrider.core.tree import ROOT, Budget, DraftTree
from outrider.drafting import disco
from outrider.drafting.base import refuse_idle
from outrider.drafting.threshold import adapted
from outrider.drafting.trees.sampled import Tree
from outrider.errors import ConfigError, unknown
from outrider.sampling.sampler import Sampler

LENGTHS = ("constant", "heuristic", "heuristic_transient")
THRESHOLDS = ("constant", "refit")
FIRST, DEEPEST = (
    5,
    20,
)  # levels: where a schedule starts, and how many there may be at most where a rule decides
REMEMBERED = 256  # judged guesses that a threshold is fitted to


@dataclass(frozen=True)
class Options:
    """num_assistant_tokens_schedule: "constant", or "heuristic": two levels more after a round that was all right, one less after any
    other, from num_assistant_tokens on (5) up to num_speculative_tokens; "heuristic_transient" starts anew with every request.
    assistant_confidence_threshold: no guess behind one that is less likely.  …_schedule "refit": the threshold follows what was right so
    far, at the least cost of false alarms + 3 · misses (transformers' names and rules).
    entropy_threshold: the λ of AdaEDL, no guess behind one whose law has an entropy H with 1 - √(entropy_factor · H) < λ; λ moves so
    that a share of entropy_target of the guesses is right.  stop_classifier: a file of `outrider tune disco`, whose network stops where
    it gives a guess less than stop_classifier_threshold.
    """

    num_assistant_tokens: int | None = None
    num_assistant_tokens_schedule: str = "constant"
    assistant_confidence_threshold: float | None = None
    assistant_confidence_schedule: str = "constant"
    entropy_threshold: float | None = None
    entropy_factor: float = 0.2
    entropy_target: float = 0.9
    stop_classifier: str | None = None
    stop_classifier_threshold: float = 0.5

    @property
    def watches(self) -> bool:
        """Whether a rule looks at guesses."""
        return any(
            x is not None
            for x in (self.assistant_confidence_threshold, self.entropy_threshold, self.stop_classifier)
        )

    @property
    def stops(self) -> bool:
        return self.watches or self.num_assistant_tokens_schedule != "constant"

    def __post_init__(self) -> None:
        for name, known in (
            ("num_assistant_tokens_schedule", LENGTHS),
            ("assistant_confidence_schedule", THRESHOLDS),
        ):
            if getattr(self, name) not in known:
                raise ConfigError(unknown(name, getattr(self, name), known))
        first = self.num_assistant_tokens
        if first is not None and not (
            isinstance(first, int) and not isinstance(first, bool) and 1 <= first <= 1024
        ):
            raise ConfigError(f"num_assistant_tokens must be a whole number in 1 … 1024, got {first!r}.")
        if first is not None and self.num_assistant_tokens_schedule == "constant":
            raise ConfigError(
                'num_assistant_tokens is where a num_assistant_tokens_schedule starts; for "constant" set num_speculative_tokens.'
            )
        for name in (
            "assistant_confidence_threshold",
            "entropy_threshold",
            "entropy_target",
            "stop_classifier_threshold",
        ):
            value = getattr(self, name)
            switch = name in ("assistant_confidence_threshold", "entropy_threshold")
            if not (value is None and switch) and not (_number(value) and 0 <= value <= 1):
                raise ConfigError(f"{name} must be a number in [0, 1], got {value!r}.")
        if not (_number(self.entropy_factor) and 0 < self.entropy_factor < math.inf):
            raise ConfigError(f"entropy_factor must be a number above 0, got {self.entropy_factor!r}.")
        if self.assistant_confidence_schedule != "constant" and self.assistant_confidence_threshold is None:
            raise ConfigError(
                "assistant_confidence_schedule needs an assistant_confidence_threshold to start from."
            )
        refuse_idle(
            self, self.entropy_threshold is not None, "entropy_threshold", "entropy_factor", "entropy_target"
        )
        refuse_idle(self, self.stop_classifier is not None, "stop_classifier", "stop_classifier_threshold")
        if self.stop_classifier is not None and not isinstance(self.stop_classifier, str):
            raise ConfigError(f"stop_classifier must be a file, got {self.stop_classifier!r}.")


def _number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


@dataclass
class Learned:
    """What outlives a request.  right: how many of the guesses were, smoothed.  judged: (probability, whether it was right)."""

    length: int
    confidence: float
    entropy: float
    right: float = 0.0
    judged: deque[tuple[float, bool]] = field(default_factory=lambda: deque(maxlen=REMEMBERED))


@dataclass
class Round:
    """The guesses of a row in one step: how many levels there might have been, and their traits, by node."""

    levels: int
    features: dict[int, NodeFeatures] = field(default_factory=dict)


class Stop:
    """The rules of one drafter.  `pairs`: give it a list, and (traits and level, whether it was right) of every judged guess goes there."""

    def __init__(self, options: Any) -> None:
        self.options = options
        self.watching, self.active = options.watches, options.stops
        lasting = (
            options.num_assistant_tokens_schedule == "heuristic",
            options.assistant_confidence_schedule == "refit",
        )
        self.learns = (
            any(lasting) or options.entropy_threshold is not None
        )  # something that outlives a request
        self.net: Tensor | None = None
        if options.stop_classifier is not None:
            self.net = disco.load(options.stop_classifier).flat(options.stop_classifier_threshold)
        first = options.num_assistant_tokens or FIRST
        self.memory = Learned(
            first, options.assistant_confidence_threshold or 0.0, options.entropy_threshold or 0.0
        )
        self.lengths: dict[Row, int] = {}
        self.rounds: dict[Row, Round] = {}
        self.pairs: list[tuple[list[float], bool]] | None = None

    @property
    def stop_rule(self) -> StopRule | None:
        """The rules that look at guesses, as the kernels take them; None where there are none."""
        if not self.watching:
            return None
        most = math.inf
        if self.options.entropy_threshold is not None:  # 1 - √(c·H) < λ  ⇔  H > (1 - λ)² / c
            most = (1 - self.memory.entropy) ** 2 / self.options.entropy_factor
        return StopRule(self.memory.confidence, most, self.net)

    def limit(self, step: RowStep) -> Budget:
        """The row's budget with as many levels as the schedule allows."""
        if self.options.num_assistant_tokens_schedule == "constant":
            return step.budget
        return step.budget.within(depth=self._length(step.row))

    def _length(self, row: Row) -> int:
        return self.lengths.get(row, self.memory.length)

    def begin(self, row: Row, levels: int) -> None:
        self.rounds[row] = Round(levels)

    def note(self, row: Row, features: Sequence[NodeFeatures]) -> None:
        """The traits of a chain."""
        self.rounds[row].features = dict(enumerate(features))

    def prune(self, tree: Tree, at: dict[int, int], sampler: Sampler, logits: Tensor) -> None:
        """Leaves those nodes on the frontier behind which guessing goes on; the logits after parent p are in row at[p]."""
        stop_rule, going = self.stop_rule, []
        if stop_rule is None:
            return
        for node in tree.frontier:
            parent = tree.parents[node]
            stops, features = sampler.should_stop(
                tree.row, tree.path_tokens(parent), logits, tree.tokens[node], stop_rule, at[parent]
            )
            self.rounds[tree.row].features[node] = features
            if not stops:
                going.append(node)
        tree.frontier = going

    def observe(self, commit: Commit) -> None:
        for step in commit.batch:
            row, tree, accepted = step.row, step.tree, step.accepted
            round = self.rounds.pop(row, None)
            if (
                round is None or not tree.tokens or row.finish_reason is not None
            ):  # what lies past the end of a text was not judged
                continue
            if not round.features or len(round.features) == len(
                tree.tokens
            ):  # one that was cut says little, and has other numbers
                self._learn(row, tree, accepted, round)

    def _learn(self, row: Row, tree: DraftTree, accepted: list[int], round: Round) -> None:
        options, memory, drafted = self.options, self.memory, levels(tree)
        if options.num_assistant_tokens_schedule != "constant":
            length = self._length(row)
            if (
                len(accepted) < drafted or round.levels >= length
            ):  # what was never tried is no reason to try more
                length = scheduled(length, len(accepted) == drafted)
            if options.num_assistant_tokens_schedule == "heuristic":
                memory.length = length
            else:
                self.lengths[row] = length
        if options.entropy_threshold is not None:
            full, share = drafted == round.levels, len(accepted) / drafted
            memory.entropy, memory.right = adapted(
                memory.entropy, memory.right, share, full, options.entropy_target
            )
        if self.pairs is not None or options.assistant_confidence_schedule == "refit":
            for features, level, right in judged(tree, accepted, round.features):
                memory.judged.append((features[0], right))
                if self.pairs is not None:
                    self.pairs.append(([*features, level], right))
        if options.assistant_confidence_schedule == "refit":
            memory.confidence = fitted(memory.judged, memory.confidence)

    def forget(self, row: Row) -> None:
        self.lengths.pop(row, None)
        self.rounds.pop(row, None)


def levels(tree: DraftTree) -> int:
    """How many levels it has."""
    depth = {ROOT: 0}
    for node, parent in enumerate(tree.parents):
        depth[node] = depth[parent] + 1
    return max(depth.values())


def scheduled(length: int, all_right: bool) -> int:
    """Levels of the next round: transformers' heuristic."""
    return length + 2 if all_right else max(1, length - 1)


def judged(
    tree: DraftTree, accepted: Sequence[int], features: dict[int, NodeFeatures]
) -> Iterator[tuple[NodeFeatures, int, bool]]:
    """(traits, level, whether it was right) of the guesses that the target has judged: the children of what was accepted."""
    for level, node in enumerate([ROOT, *accepted]):
        for child, parent in enumerate(tree.parents):
            if parent == node and child in features:
                yield features[child], level, child in accepted


def fitted(history: Sequence[tuple[float, bool]] | deque[tuple[float, bool]], before: float) -> float:
    """The threshold that separates right from wrong guesses at the least false positive rate + 3 · false negative rate, the highest of
    several; the one from `before` while there are not more than five guesses of both kinds."""
    right = sum(good for _, good in history)
    wrong = len(history) - right
    if len(history) <= 5 or not right or not wrong:
        return before
    best, least, hits, alarms = before, math.inf, 0, 0
    ordered = sorted(history, reverse=True)
    for i, (p, good) in enumerate(ordered):
        hits, alarms = hits + good, alarms + (not good)
        if i + 1 == len(ordered) or ordered[i + 1][0] < p:
            cost = alarms * right + 3 * (right - hits) * wrong  # in whole numbers, so that equals are equal
            if cost < least:
                best, least = p, cost
    return best
