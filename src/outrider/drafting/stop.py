"""Rules that stop a draft model early: by what it has drafted in this step, and by how earlier steps went.

A rule judges a node by its features (its probability, the entropy of q, …).  The node stays, but nothing is
drafted after it.  The rules do not look at the target's answer of this step, so they work with every
verification rule.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, NamedTuple

from torch import Tensor

from outrider.core.row import Row
from outrider.core.step import Commit, RowStep
from outrider.core.stop_rule import NodeFeatures, StopRule
from outrider.core.tree import ROOT, Budget, DraftTree
from outrider.core.validate import Checked, Kind, Positive, Share, one_of, whole
from outrider.drafting import disco
from outrider.drafting.options import refuse_idle
from outrider.drafting.threshold import adapt_threshold
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
        """Whether any option can end a draft early."""
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
class StopMemory:
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
class RowDraft:
    """The draft of a row in one step: its maximum depth, and the features of its nodes, by number."""

    depth: int
    features: dict[int, NodeFeatures] = field(default_factory=dict)


class Stop:
    """The stop rules of one drafter.

    pairs: if set to a list, (features and depth, whether it was accepted) of every judged node is appended to
    it.
    """

    def __init__(self, options: Any) -> None:
        self.options, self.active, self.judges_nodes = options, options.stops, options.judges_nodes
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
        self.memory = StopMemory(first, confidence or 0.0, entropy or 0.0)
        self.lengths: dict[Row, int] = {}
        self.drafts: dict[Row, RowDraft] = {}  # of this step
        self.pairs: list[tuple[list[float], bool]] | None = None

    @property
    def stop_rule(self) -> StopRule | None:
        """The rules that judge nodes, as the backends take them; None if there are none."""
        if not self.judges_nodes:
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
        """Begin a draft of this maximum depth."""
        self.drafts[row] = RowDraft(depth)

    def note(self, row: Row, features: Sequence[NodeFeatures]) -> None:
        """Record the features of a chain."""
        self.drafts[row].features = dict(enumerate(features))

    def prune(self, tree: Tree, rows: dict[int, int], sampler: Sampler, logits: Tensor) -> None:
        """Keep the frontier nodes after which drafting continues.

        rows: parent -> row of the logits after it
        """
        stop_rule = self.stop_rule
        if stop_rule is None:
            return
        frontier = []
        for node in tree.frontier:
            parent = tree.parents[node]
            path, token = tree.path_tokens(parent), tree.tokens[node]
            stops, features = sampler.should_stop(tree.row, path, logits, token, stop_rule, rows[parent])
            self.drafts[tree.row].features[node] = features
            if not stops:
                frontier.append(node)
        tree.frontier = frontier

    def observe(self, commit: Commit) -> None:
        """Adapt lengths and thresholds to the accepted tokens of a step."""
        for step in commit.batch:
            row, tree = step.row, step.tree
            draft = self.drafts.pop(row, None)
            # A finished row may have been cut by the end of its text: its last nodes were not judged.
            if draft is None or not tree.tokens or row.finish_reason is not None:
                continue
            # A trimmed tree has other node numbers than the features.
            if not draft.features or len(draft.features) == len(tree.tokens):
                depth = max(tree.depths)
                self._learn_length(row, draft, depth, len(step.accepted))
                self._learn_entropy(draft, depth, len(step.accepted))
                self._learn_confidence(judged_nodes(tree, step.accepted, draft.features))

    def _learn_length(self, row: Row, draft: RowDraft, depth: int, accepted: int) -> None:
        """Update the length schedule by a judged draft of this depth."""
        schedule, length = self.options.num_assistant_tokens_schedule, self._length(row)
        if schedule == "constant":
            return
        # A draft that another limit cut short is no evidence about a greater depth.
        if accepted < depth or draft.depth >= length:
            length = next_length(length, accepted == depth)
        if schedule == "heuristic":
            self.memory.length = length
        else:
            self.lengths[row] = length

    def _learn_entropy(self, draft: RowDraft, depth: int, accepted: int) -> None:
        """Update the entropy threshold by a judged draft of this depth."""
        options, memory = self.options, self.memory
        if options.entropy_threshold is not None:
            memory.entropy, memory.accepted = adapt_threshold(
                memory.entropy,
                memory.accepted,
                accepted / depth,
                depth == draft.depth,
                options.entropy_target,
            )

    def _learn_confidence(self, nodes: Iterable[JudgedNode]) -> None:
        """Refit the confidence threshold to judged nodes, and record them."""
        refit = self.options.assistant_confidence_schedule == "refit"
        if self.pairs is None and not refit:
            return
        for node in nodes:
            self.memory.judged.append((node.features[0], node.accepted))
            if self.pairs is not None:
                self.pairs.append(([*node.features, node.depth], node.accepted))
        if refit:
            self.memory.confidence = fit_threshold(self.memory.judged, self.memory.confidence)

    def forget(self, row: Row) -> None:
        self.lengths.pop(row, None)
        self.drafts.pop(row, None)


def next_length(length: int, all_accepted: bool) -> int:
    """The depth of the next draft by transformers' heuristic."""
    return length + 2 if all_accepted else max(1, length - 1)


class JudgedNode(NamedTuple):
    """A draft node that the target accepted or rejected.  depth: from 0."""

    features: NodeFeatures
    depth: int
    accepted: bool


def judged_nodes(
    tree: DraftTree, accepted: Sequence[int], features: dict[int, NodeFeatures]
) -> Iterator[JudgedNode]:
    """The children of the accepted path, as far as they have features."""
    for depth, node in enumerate([ROOT, *accepted]):
        for child, parent in enumerate(tree.parents):
            if parent == node and child in features:
                yield JudgedNode(features[child], depth, child in accepted)


def fit_threshold(history: Collection[tuple[float, bool]], before: float) -> float:
    """The threshold with the least false positive rate + 3 · false negative rate; of equals the highest.

    history: (probability, whether it was accepted) of judged nodes.  Returns `before` while there are five or
    fewer, or all are alike.
    """
    num_right = sum(right for _, right in history)
    num_wrong = len(history) - num_right
    if len(history) <= 5 or not num_right or not num_wrong:
        return before
    threshold, least_cost = before, math.inf
    right_above = wrong_above = 0  # nodes at least as probable as this one
    ordered = sorted(history, reverse=True)
    for i, (probability, right) in enumerate(ordered):
        right_above += right
        wrong_above += not right
        if i + 1 < len(ordered) and ordered[i + 1][0] == probability:
            continue  # nodes of one probability are on one side of a threshold
        # both rates times num_right · num_wrong: in integers ties are exact
        cost = wrong_above * num_right + 3 * (num_right - right_above) * num_wrong
        if cost < least_cost:
            threshold, least_cost = probability, cost
    return threshold
