"""What the methods that look text up have in common: how far a match is trusted, and a tree of what followed it."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from outrider.types import ROOT, Budget, Guesses


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

    def passed(self, shortest: int, longest: int) -> None:
        for n in range(shortest, min(longest, len(self.values) - 1) + 1):
            self.values[n] += self.learn / 10 * (self.start[n] - self.values[n])

    def observe(self, length: int, tree: Guesses, accepted: Sequence[int]) -> None:
        """What became of a tree after a match of `length` tokens.

        A level was right if one of its nodes was; the level after it stands for a match one token longer.
        """
        for level, node in enumerate([ROOT, *accepted]):
            right = level < len(accepted)
            if right or node in tree.parents[: tree.size]:
                at = min(length + level, len(self.values) - 1)
                self.values[at] += self.learn * (right - self.values[at])


def frequent(
    texts: Sequence[Sequence[int]], budget: Budget, belief: Belief, length: int, least: float, siblings: int
) -> tuple[Guesses, float]:
    """The likeliest continuations as a tree, and the sum of the probabilities of its nodes: how many are expected to be right.

    texts: what followed a match of `length` tokens, most recent first; ids below 0 end one.  A token is as likely as its share of the
    texts that agree so far, times the belief in a match so long.  Nodes are taken best first, `siblings` below each at most, none
    that is less likely than `least` from the root on.
    """
    tree = Guesses([], [], [])
    waiting: list[tuple[float, int, int, int, int, float, Sequence[Sequence[int]]]] = []
    score, made = 0.0, 0

    def open_children(parent: int, level: int, joint: float, texts: Sequence[Sequence[int]]) -> None:
        nonlocal made
        groups: dict[int, list[Sequence[int]]] = {}
        for text in texts:
            if len(text) > level and text[level] >= 0:
                groups.setdefault(text[level], []).append(text)
        total, believed = sum(map(len, groups.values())), belief(length + level)
        for token, group in sorted(groups.items(), key=lambda item: -len(item[1]))[:siblings]:
            share = believed * len(group) / total
            if joint * share >= least:
                made += 1  # of equal ones the first, which is the most recent
                heapq.heappush(waiting, (-joint * share, made, parent, token, level, share, group))

    open_children(ROOT, 0, 1.0, texts)
    while waiting and len(tree.tokens) < budget.nodes:
        joint, _, parent, token, level, share, group = heapq.heappop(waiting)
        tree.tokens.append(token)
        tree.parents.append(parent)
        tree.confidence.append(share)
        score -= joint
        if level + 1 < budget.depth:
            open_children(len(tree.tokens) - 1, level + 1, -joint, group)
    return tree, score
