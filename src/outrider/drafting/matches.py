"""Shared by the methods that look text up: the confidence of a match, and the tree of what followed it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from outrider.core.tree import ROOT, DraftTree
from outrider.drafting.best_first import BestFirst

Continuation = tuple[tuple[int, ...], int]  # the tokens that followed a match, and how often they did


class MatchAcceptance:
    """Estimated acceptance of the token after a match of 1, 2, … `longest` or more tokens.

    The estimate starts at 1 - 2^-length.  A judged draft token moves it by the share `rate` towards 1 or 0.
    A skipped opportunity moves it by rate / 10 towards its start, so that a length that keeps failing is
    tried again later.
    """

    def __init__(self, longest: int, rate: float = 0.2) -> None:
        self.start = [1 - 0.5**n for n in range(longest + 1)]
        self.values, self.rate = list(self.start), rate

    def __call__(self, length: int) -> float:
        return self.values[min(length, len(self.values) - 1)]

    def highest(self, shortest: int, longest: int) -> float:
        """The highest estimate after a match of shortest … longest tokens."""
        return max(self.values[shortest : longest + 1])

    def expected_tokens(self, length: int, depth: int) -> float:
        """Expected accepted tokens of a chain of `depth` tokens after a match with one continuation."""
        joint, expected, last = 1.0, 0.0, len(self.values) - 1
        for n in range(length, length + depth):
            joint *= self.values[n if n < last else last]
            expected += joint
        return expected

    def skip(self, shortest: int, longest: int) -> None:
        """Record that matches of these lengths were not drafted from."""
        for n in range(shortest, min(longest, len(self.values) - 1) + 1):
            self.values[n] += self.rate / 10 * (self.start[n] - self.values[n])

    def observe(self, length: int, tree: DraftTree, accepted: Sequence[int]) -> None:
        """Learn from the accepted path of a tree after a match of `length` tokens.

        Depth d counts as a match of length + d tokens.  It counts as right if one of its nodes was accepted.
        """
        values, last, rate, right = self.values, len(self.values) - 1, self.rate, len(accepted)
        for n in range(length, length + right):
            at = n if n < last else last
            values[at] += rate * (1 - values[at])
        if (accepted[-1] if accepted else ROOT) in tree.parents[: tree.size]:
            at = min(length + right, last)
            values[at] -= rate * values[at]


class TreeLimits(NamedTuple):
    """Limits of a tree: its depth and nodes, children of a node, least joint probability of a node."""

    depth: int
    nodes: int
    siblings: int
    min_prob: float


def continuation_tree(
    texts: Sequence[Sequence[int]], acceptance: MatchAcceptance, length: int, limits: TreeLimits
) -> tuple[DraftTree, float]:
    """The most probable continuations of a match as a tree, and the expected number of its accepted nodes.

    texts: what followed a match of `length` tokens, most recent first; an id below 0 ends one.  A token's
    probability is its share of the texts that agree so far, times the acceptance of a match so long.
    """
    builder = _Builder(acceptance, length, limits)
    if texts and texts.count(texts[0]) == len(texts):  # the usual case needs neither counts nor a queue
        builder.append_chain(texts[0][: limits.depth], 0, 1.0)
    else:
        # A text that repeats itself yields equal continuations many times.
        builder.grow(list(Counter(map(tuple, texts)).items()))
    return builder.tree, builder.expected


class _Candidate(NamedTuple):
    """A token for a node at `depth`, from 0.  probability: given its parent.  texts: those through it."""

    parent: int
    depth: int
    token: int
    probability: float
    texts: list[Continuation]


class _Builder:
    """A tree while it grows, and the expected number of its accepted nodes."""

    def __init__(self, acceptance: MatchAcceptance, length: int, limits: TreeLimits) -> None:
        self.acceptance, self.length, self.limits = acceptance, length, limits
        self.tree, self.expected = DraftTree([], [], []), 0.0

    def grow(self, texts: list[Continuation]) -> None:
        """Append the most probable candidate until the nodes are used up."""
        self.queue = BestFirst[_Candidate]()
        self._push_children(ROOT, 0, 1.0, texts)
        while self.queue and len(self.tree.tokens) < self.limits.nodes:
            joint, node = self.queue.pop()
            self._append(node.parent, node.token, node.probability, joint)
            if len(node.texts) == 1 and not self.queue:
                self.append_chain(node.texts[0][0][: self.limits.depth], node.depth + 1, joint)
                return
            if node.depth + 1 < self.limits.depth:
                self._push_children(len(self.tree.tokens) - 1, node.depth + 1, joint, node.texts)

    def _push_children(self, parent: int, depth: int, joint: float, texts: list[Continuation]) -> None:
        """Push the most frequent tokens at `depth` of the texts through `parent`; of a tie the latest.

        joint: probability of the path to `parent`
        """
        groups, counts = dict[int, list[Continuation]](), dict[int, int]()  # by token
        for text in texts:
            tokens, count = text
            if len(tokens) > depth and (token := tokens[depth]) >= 0:
                groups.setdefault(token, []).append(text)
                counts[token] = counts.get(token, 0) + count
        total, accepted = sum(counts.values()), self.acceptance(self.length + depth)
        ranked = sorted(groups, key=lambda token: -counts[token]) if len(groups) > 1 else list(groups)
        for token in ranked[: self.limits.siblings]:
            probability = accepted * counts[token] / total
            if joint * probability >= self.limits.min_prob:
                candidate = _Candidate(parent, depth, token, probability, groups[token])
                self.queue.push(joint * probability, candidate)

    def append_chain(self, text: Sequence[int], depth: int, joint: float) -> None:
        """Append text[depth:] below the last node, of this joint probability, within the limits."""
        values, last, tree = self.acceptance.values, len(self.acceptance.values) - 1, self.tree
        confidence: list[float] = []
        for token in text[depth : depth + self.limits.nodes - len(tree.tokens)]:
            probability = values[min(self.length + depth + len(confidence), last)]
            joint *= probability
            if token < 0 or joint < self.limits.min_prob:
                break
            confidence.append(probability)
            self.expected += joint
        size = len(tree.tokens)
        tree.tokens.extend(text[depth : depth + len(confidence)])
        tree.parents.extend(range(size - 1, size - 1 + len(confidence)))
        tree.confidence.extend(confidence)

    def _append(self, parent: int, token: int, probability: float, joint: float) -> None:
        self.tree.tokens.append(token)
        self.tree.parents.append(parent)
        self.tree.confidence.append(probability)
        self.expected += joint
