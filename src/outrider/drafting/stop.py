"""Rules that stop a draft model early: by what it has drafted in this step, and by how earlier steps went.

A rule judges a node by its features (its probability, the entropy of q, …).  The node stays, but nothing is
drafted after it.  The rules do not look at the target's answer of this step, so they work with every
verification rule.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

from torch import Tensor

from outrider.core.row import Row
from outrider.core.step import Commit, RowStep
from outrider.core.stop_rule import NodeFeatures, StopRule
from outrider.core.tree import ROOT, Budget, DraftTree
from outrider.core.validate import Checked, Kind, Positive, Share, one_of, whole
from outrider.drafting import disco
from outrider.drafting.options import refuse_idle
from outrider.drafting.threshold import adapted
from outrider.drafting.trees.sampled import Tree
from outrider.errors import ConfigError
from outrider.sampling.sampler import Sampler

LENGTH_SCHEDULES = one_of("constant", "heuristic", "heuristic_transient")
THRESHOLD_SCHEDULES = one_of("constant", "refit")
FIRST_DEPTH, MAX_DEPTH = 5, 20  # where a length schedule starts; the default maximum depth if a rule decides
HISTORY = 256  # judged nodes that a threshold is fitted to
FILE = Kind("a file", lambda value: isinstance(value, str))


@dataclass(frozen=True)
class Options(Checked):
    """Options for stopping a draft early.  Names and rules are those of transformers, unless a paper is
    given.

    num_assistant_tokens_schedule: "constant", "heuristic" or "heuristic_transient".  The depth of "heuristic"
        grows by two after a step whose tokens were all accepted and shrinks by one after any other.  It
        starts at num_assistant_tokens (default 5) and ends at num_speculative_tokens.  "heuristic_transient"
        starts anew with every request.
    assistant_confidence_threshold: stop after a node that is less probable.
    assistant_confidence_schedule: "refit" moves the threshold to the least cost of false alarms + 3 · misses
        so far.
    entropy_threshold: λ of AdaEDL: stop after a node whose q has an entropy H with 1 - √(entropy_factor · H)
        < λ.  λ moves so that a share of entropy_target of the draft tokens is accepted.
    stop_classifier: a file of `outrider tune disco`; stop where its network gives a node less than
        stop_classifier_threshold.
    """

    num_assistant_tokens: Annotated[int, whole(1, 1024)] | None = None
    num_assistant_tokens_schedule: Annotated[str, LENGTH_SCHEDULES] = "constant"
    assistant_confidence_threshold: Share | None = None
    assistant_confidence_schedule: Annotated[str, THRESHOLD_SCHEDULES] = "constant"
    entropy_threshold: Share | None = None
    entropy_factor: Positive = 0.2
    entropy_target: Share = 0.9
    stop_classifier: Annotated[str, FILE] | None = None
    stop_classifier_threshold: Share = 0.5

    @property
    def judges_nodes(self) -> bool:
        """Whether a rule looks at nodes."""
        rules = (self.assistant_confidence_threshold, self.entropy_threshold, self.stop_classifier)
        return any(rule is not None for rule in rules)

    @property
    def stops(self) -> bool:
        return self.judges_nodes or self.num_assistant_tokens_schedule != "constant"

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_schedules()
        classifier, entropy = self.stop_classifier, self.entropy_threshold is not None
        refuse_idle(self, entropy, "entropy_threshold", "entropy_factor", "entropy_target")
        refuse_idle(self, classifier is not None, "stop_classifier", "stop_classifier_threshold")

    def _check_schedules(self) -> None:
        first = self.num_assistant_tokens
        if first is not None and self.num_assistant_tokens_schedule == "constant":
            raise ConfigError(
                "num_assistant_tokens is where a num_assistant_tokens_schedule starts; "
                'for "constant" set num_speculative_tokens.'
            )
        if self.assistant_confidence_schedule != "constant" and self.assistant_confidence_threshold is None:
            raise ConfigError(
                "assistant_confidence_schedule needs an assistant_confidence_threshold to start from."
            )


@dataclass
class Learned:
    """State kept between requests.

    length: depth of the next draft.  confidence, entropy: the thresholds.  accepted: smoothed share of
        accepted tokens.
    judged: (probability, whether it was accepted) of the last nodes that the target judged.
    """

    length: int
    confidence: float
    entropy: float
    accepted: float = 0.0
    judged: deque[tuple[float, bool]] = field(default_factory=lambda: deque(maxlen=HISTORY))


@dataclass
class Round:
    """The draft of a row in one step: its maximum depth, and the features of its nodes."""

    depth: int
    features: dict[int, NodeFeatures] = field(default_factory=dict)


class Stop:
    """The stop rules of one drafter.

    pairs: if set to a list, (features and depth, whether it was accepted) of every judged node is appended to
    it.
    """

    def __init__(self, options: Any) -> None:
        self.options, self.active = options, options.stops
        self.learns = (
            options.num_assistant_tokens_schedule == "heuristic"
            or options.assistant_confidence_schedule == "refit"
            or options.entropy_threshold is not None
        )
        self.net: Tensor | None = None
        if options.stop_classifier is not None:
            self.net = disco.load(options.stop_classifier).flat(options.stop_classifier_threshold)
        first = options.num_assistant_tokens or FIRST_DEPTH
        confidence, entropy = options.assistant_confidence_threshold, options.entropy_threshold
        self.memory = Learned(first, confidence or 0.0, entropy or 0.0)
        self.lengths: dict[Row, int] = {}
        self.rounds: dict[Row, Round] = {}
        self.pairs: list[tuple[list[float], bool]] | None = None

    @property
    def stop_rule(self) -> StopRule | None:
        """The rules that judge nodes, as the backends take them; None if there are none."""
        if not self.options.judges_nodes:
            return None
        max_entropy = math.inf
        if self.options.entropy_threshold is not None:  # 1 - √(c·H) < λ  ⇔  H > (1 - λ)² / c
            max_entropy = (1 - self.memory.entropy) ** 2 / self.options.entropy_factor
        return StopRule(self.memory.confidence, max_entropy, self.net)

    def limit(self, step: RowStep) -> Budget:
        """The row's budget, cut to the depth of the length schedule."""
        if self.options.num_assistant_tokens_schedule == "constant":
            return step.budget
        return step.budget.within(depth=self._length(step.row))

    def _length(self, row: Row) -> int:
        return self.lengths.get(row, self.memory.length)

    def begin(self, row: Row, depth: int) -> None:
        self.rounds[row] = Round(depth)

    def note(self, row: Row, features: Sequence[NodeFeatures]) -> None:
        """Record the features of a chain."""
        self.rounds[row].features = dict(enumerate(features))

    def prune(self, tree: Tree, rows: dict[int, int], sampler: Sampler, logits: Tensor) -> None:
        """Keep frontier nodes after which drafting goes on.  rows: parent -> row of the logits after it."""
        stop_rule = self.stop_rule
        if stop_rule is None:
            return
        frontier = []
        for node in tree.frontier:
            parent = tree.parents[node]
            path, token = tree.path_tokens(parent), tree.tokens[node]
            stops, features = sampler.should_stop(tree.row, path, logits, token, stop_rule, rows[parent])
            self.rounds[tree.row].features[node] = features
            if not stops:
                frontier.append(node)
        tree.frontier = frontier

    def observe(self, commit: Commit) -> None:
        for step in commit.batch:
            row, tree = step.row, step.tree
            round = self.rounds.pop(row, None)
            # A finished row may have been cut by the end of its text: its last nodes were not judged.
            if round is None or not tree.tokens or row.finish_reason is not None:
                continue
            # A trimmed tree has other node numbers than the features.
            if not round.features or len(round.features) == len(tree.tokens):
                self._learn(row, tree, step.accepted, round)

    def _learn(self, row: Row, tree: DraftTree, accepted: Sequence[int], round: Round) -> None:
        """Update length and thresholds by one judged draft."""
        options, memory, drafted = self.options, self.memory, max(tree.depths, default=0)
        if options.num_assistant_tokens_schedule != "constant":
            length = self._length(row)
            # A draft that another limit cut short is no evidence about a greater depth.
            if len(accepted) < drafted or round.depth >= length:
                length = scheduled(length, len(accepted) == drafted)
            if options.num_assistant_tokens_schedule == "heuristic":
                memory.length = length
            else:
                self.lengths[row] = length
        if options.entropy_threshold is not None:
            full, share, target = drafted == round.depth, len(accepted) / drafted, options.entropy_target
            memory.entropy, memory.accepted = adapted(memory.entropy, memory.accepted, share, full, target)
        refit = options.assistant_confidence_schedule == "refit"
        if self.pairs is not None or refit:
            for features, depth, right in judged(tree, accepted, round.features):
                memory.judged.append((features[0], right))
                if self.pairs is not None:
                    self.pairs.append(([*features, depth], right))
        if refit:
            memory.confidence = fitted(memory.judged, memory.confidence)

    def forget(self, row: Row) -> None:
        self.lengths.pop(row, None)
        self.rounds.pop(row, None)


def scheduled(length: int, all_accepted: bool) -> int:
    """The depth of the next draft by transformers' heuristic."""
    return length + 2 if all_accepted else max(1, length - 1)


def judged(
    tree: DraftTree, accepted: Sequence[int], features: dict[int, NodeFeatures]
) -> Iterator[tuple[NodeFeatures, int, bool]]:
    """(features, depth, whether it was accepted) of the judged nodes: children of the accepted path."""
    for depth, node in enumerate([ROOT, *accepted]):
        for child, parent in enumerate(tree.parents):
            if parent == node and child in features:
                yield features[child], depth, child in accepted


def fitted(history: Sequence[tuple[float, bool]] | deque[tuple[float, bool]], before: float) -> float:
    """The threshold with the least false positive rate + 3 · false negative rate; the highest of equally good
    ones.

    history: (probability, whether it was accepted).  Returns `before` while there are five or fewer, or all
    are alike.
    """
    right = sum(good for _, good in history)
    wrong = len(history) - right
    if len(history) <= 5 or not right or not wrong:
        return before
    threshold, least_cost, hits, alarms = before, math.inf, 0, 0
    ordered = sorted(history, reverse=True)
    for i, (p, good) in enumerate(ordered):
        hits, alarms = hits + good, alarms + (not good)
        if i + 1 == len(ordered) or ordered[i + 1][0] < p:
            # the rates in integers, so that ties are exact
            cost = alarms * right + 3 * (right - hits) * wrong
            if cost < least_cost:
                threshold, least_cost = p, cost
    return threshold
