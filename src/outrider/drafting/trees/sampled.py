"""A tree that grows by the best, or by sampled, children of its frontier."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor

from outrider.core.row import Row
from outrider.core.step_input import StepInput
from outrider.core.tree import Budget
from outrider.drafting.trees.builder import SAMPLE_CONFIDENCE, Children, LevelBuilder
from outrider.sampling import random_streams


class Tree(LevelBuilder):
    """Draft tree with at most `siblings` nodes at each depth."""

    def __init__(self, row: Row, base: int, budget: Budget, siblings: int, **level: Any) -> None:
        """level: as of `LevelBuilder`."""
        super().__init__(row, base, budget, **level)
        self.siblings = siblings

    def choose(self, children: Iterable[tuple[int, int, float]]) -> None:
        """Add the best of all (parent, token, probability) as the next level, by joint probability."""
        best = sorted(children, key=lambda child: -self.joint[child[0]] * child[2])
        self.frontier = [self.add(*child) for child in best[: self._level_size]]

    def draw(self, distributions: dict[int, Tensor], children: Children = random_streams.children) -> None:
        """Add children sampled from the distributions, float64 [V], of their parents as the next level.

        The number of samples of a parent depends on the probability of its own path.  All samples are kept:
        a choice among them by their tokens would not be a sample of q.
        """
        self.frontier = []
        for parent, count in self._shares(list(distributions)).items():
            distribution = self.add_distribution(distributions[parent])
            self.frontier += self.add_samples(parent, distribution, count, children)

    def add_to(self, step_input: StepInput) -> None:
        if self.siblings > 1:
            super().add_to(step_input)
            return
        for node in self.frontier:  # the slots of a chain are in position order: it needs no path
            self.view.chain(step_input, self.base + node, [self.tokens[node]])

    @property
    def _level_size(self) -> int:
        return min(self.siblings, self.room)

    def _shares(self, parents: list[int]) -> dict[int, int]:
        """The number of children of each parent: nodes go where they are likeliest to be accepted."""
        shares = dict.fromkeys(parents, 0)
        for _ in range(self._level_size if parents else 0):
            best = max(parents, key=lambda parent: self.joint[parent] * SAMPLE_CONFIDENCE[shares[parent]])
            shares[best] += 1
        return {parent: count for parent, count in shares.items() if count}
