"""The tree of one row while a draft model grows it, level by level."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from torch import Tensor

from outrider.core.row import Row
from outrider.core.step_input import StepInput
from outrider.core.tree import ROOT, Budget, DraftTree
from outrider.drafting.view import View
from outrider.sampling import random_streams

# How likely the best, second best … by noised draft logit is the target's pick.  The noise is shared, so the rank says more than q:
# 4 levels of 3 siblings on the built-in pair at T = 0.8 gave 2.70 tokens a step with these, 2.40 by q.
RANKED = [0.7, 0.15, 0.06, 0.03] + [0.02 * 0.8**i for i in range(60)]
# How likely the first, second … of some draws is accepted: which token it is hardly matters, p/q is as likely to be large at any.
# The same tree under rejection: 3.03 tokens a step with these, 2.79 by q.
DRAWN = [0.6, 0.25, 0.1, 0.05] + [0.02 * 0.8**i for i in range(60)]


@dataclass
class Tree:
    """`siblings` nodes a level at most."""

    row: Row
    base: int  # position of the first guess
    budget: Budget
    siblings: int
    view: View
    repeats: bool = False
    stream_id: int = 0
    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    confidence: list[float] = field(default_factory=list)
    distributions: list[Tensor] = field(default_factory=list)
    probs_of: list[int] = field(default_factory=list)
    paths: dict[int, list[int]] = field(
        default_factory=lambda: {ROOT: []}
    )  # node -> the nodes from the root to it
    joint: dict[int, float] = field(default_factory=lambda: {ROOT: 1.0})
    frontier: list[int] = field(default_factory=lambda: [ROOT])

    @property
    def draft_tree(self) -> DraftTree:
        draft_tree = DraftTree(self.tokens, self.parents, self.confidence)
        return (
            draft_tree._replace(
                distributions=self.distributions, probs_of=self.probs_of, repeats=self.repeats
            )
            if self.distributions
            else draft_tree
        )

    @property
    def growing(self) -> bool:
        tip = len(self.paths[self.frontier[0]]) if self.frontier else self.budget.depth
        return tip < self.budget.depth and len(self.tokens) < self.budget.nodes

    def path_tokens(self, node: int) -> list[int]:
        return [self.tokens[i] for i in self.paths[node]]

    def choose(self, children: Iterable[tuple[int, int, float]]) -> None:
        """Adds the best (parent, token, probability) of all as the next level."""
        best = sorted(children, key=lambda c: -self.joint[c[0]] * c[2])
        self.frontier = []
        for parent, token, probability in best[: self._room()]:
            self._add(parent, token, probability, -1)

    def draw(self, distributions: dict[int, Tensor]) -> None:
        """Adds children that are drawn from the laws (float64 [V]) of their parents as the next level.

        How many a parent gets depends on how likely its own path is, and every one of them stays, whatever it is: a choice among them
        by what they are would not be a draw any more.
        """
        self.frontier = []
        for parent, count in self._shares(list(distributions)).items():
            self.distributions.append(distributions[parent])
            first = self.stream_id + len(self.tokens)
            for rank, token in enumerate(
                random_streams.children(
                    self.row, distributions[parent], range(first, first + count), self.repeats
                )
            ):
                self._add(parent, token, DRAWN[rank], len(self.distributions) - 1)

    def add_to(self, step_input: StepInput) -> None:
        """The frontier's rows of the next forward."""
        for node in self.frontier:
            if self.siblings == 1:  # a chain lies in its natural slots and needs no path
                self.view.chain(step_input, self.base + node, [self.tokens[node]])
            else:
                self.view.node(step_input, self.base, self.paths[node], self.tokens[node])

    def _room(self) -> int:
        return min(self.siblings, self.budget.nodes - len(self.tokens))

    def _shares(self, parents: list[int]) -> dict[int, int]:
        """How many children each parent gets: the level's nodes go where they are likeliest to be right."""
        shares = dict.fromkeys(parents, 0)
        for _ in range(self._room() if parents else 0):
            shares[max(parents, key=lambda parent: self.joint[parent] * DRAWN[shares[parent]])] += 1
        return {parent: count for parent, count in shares.items() if count}

    def _add(self, parent: int, token: int, probability: float, distribution: int) -> None:
        node = len(self.tokens)
        self.tokens.append(token)
        self.parents.append(parent)
        self.confidence.append(probability)
        self.probs_of.append(distribution)
        self.paths[node] = [*self.paths[parent], node]
        self.joint[node] = self.joint[parent] * probability
        self.frontier.append(node)
