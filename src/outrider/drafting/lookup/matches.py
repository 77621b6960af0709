"""What the methods that look text up have in common: how far a match is trusted, and a tree of what followed it."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Sequence

from outrider.core.tree import ROOT, Budget, DraftTree

Counted = tuple[tuple[int, ...], int]  # a text, and how often it occurs


class Belief:
    """How often the token after a match of 1, 2, … `longest` or more tokens was guessed right.

    Starts at 1 - 2^-length.  A guess moves it by the share `learn` towards what happened, an opportunity that was let pass by a
    tenth of that back to where it began: a length that keeps failing is not guessed from, and tried again some time later.
    """

    def __init__(self, longest: int, learn: float = 0.2) -> None:
        self.start = [1 - 0.5**n for n in range(longest + 1)]
        self.values, self.learn = list(self.start), learn

    def __call__(self, length: int) -> float:
        return self.values[min(length, len(self.values) - 1)]

    def best(self, shortest: int, longest: int) -> float:
        return max(self.values[shortest : longest + 1])

    def promise(self, length: int, levels: int) -> float:
        """What so many levels after a match are worth at most: the sum of the probabilities of a chain that nothing else followed."""
        joint, whole, most = 1.0, 0.0, len(self.values) - 1
        for n in range(length, length + levels):
            joint *= self.values[n if n < most else most]
            whole += joint
        return whole

    def passed(self, shortest: int, longest: int) -> None:
        for n in range(shortest, min(longest, len(self.values) - 1) + 1):
            self.values[n] += self.learn / 10 * (self.start[n] - self.values[n])

    def observe(self, length: int, tree: DraftTree, accepted: Sequence[int]) -> None:
        """What became of a tree after a match of `length` tokens.

        A level was right if one of its nodes was; the level after it stands for a match one token longer.
        """
        values, most, learn, right = self.values, len(self.values) - 1, self.learn, len(accepted)
        for n in range(length, length + right):
            at = n if n < most else most
            values[at] += learn * (1 - values[at])
        if (accepted[-1] if accepted else ROOT) in tree.parents[: tree.size]:
            at = min(length + right, most)
            values[at] -= learn * values[at]


def frequent(
    texts: Sequence[Sequence[int]], budget: Budget, belief: Belief, length: int, least: float, siblings: int
) -> tuple[DraftTree, float]:
    """The likeliest continuations as a tree, and the sum of the probabilities of its nodes: how many are expected to be right.

    texts: what followed a match of `length` tokens, most recent first; ids below 0 end one.  A token is as likely as its share of the
    texts that agree so far, times the belief in a match so long.  Nodes are taken best first, `siblings` below each at most, none
    that is less likely than `least` from the root on.
    """
    tree = DraftTree([], [], [])
    if texts and texts.count(texts[0]) == len(texts):  # as a rule: no counting, no choice
        return tree, _copied(tree, texts[0][: budget.depth], budget.nodes, belief, length, 1.0, least)
    waiting: list[tuple[float, int, int, int, int, float, list[Counted]]] = []
    score, made = 0.0, 0

    def open_children(parent: int, level: int, joint: float, texts: list[Counted]) -> None:
        nonlocal made
        groups: dict[int, list[Counted]] = {}
        for counted in texts:
            text = counted[0]
            if len(text) > level and text[level] >= 0:
                groups.setdefault(text[level], []).append(counted)
        sizes = [(sum([count for _, count in group]), token, group) for token, group in groups.items()]
        total, believed = sum([size for size, _, _ in sizes]), belief(length + level)
        if len(sizes) > 1:
            sizes.sort(key=lambda item: -item[0])
        for size, token, group in sizes[:siblings]:
            share = believed * size / total
            if joint * share >= least:
                made += 1  # of equal ones the first, which is the most recent
                heapq.heappush(waiting, (-joint * share, made, parent, token, level, share, group))

    open_children(
        ROOT, 0, 1.0, list(Counter(map(tuple, texts)).items())
    )  # a text that repeats itself followed itself many times
    while waiting and len(tree.tokens) < budget.nodes:
        joint, _, parent, token, level, share, group = heapq.heappop(waiting)
        tree.tokens.append(token)
        tree.parents.append(parent)
        tree.confidence.append(share)
        score -= joint
        if len(group) == 1 and not waiting:
            rest, most = group[0][0][level + 1 : budget.depth], budget.nodes
            return tree, score + _copied(tree, rest, most, belief, length + level + 1, -joint, least)
        if level + 1 < budget.depth:
            open_children(len(tree.tokens) - 1, level + 1, -joint, group)
    return tree, score


def _copied(
    tree: DraftTree, text: Sequence[int], nodes: int, belief: Belief, length: int, joint: float, least: float
) -> float:
    """The rest of a tree of which only one text is left: a chain below its last node.  Returns what it adds to the score."""
    score, values, most = 0.0, belief.values, len(belief.values) - 1
    for token in text[: nodes - len(tree.tokens)]:
        share = values[length if length < most else most]
        joint *= share
        if token < 0 or joint < least:
            break
        tree.parents.append(len(tree.tokens) - 1)
        tree.tokens.append(token)
        tree.confidence.append(share)
        score, length = score + joint, length + 1
    return score
