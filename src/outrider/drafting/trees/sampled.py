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
    """Draft tree with at most `siblings` nodes at each depth.

    draws: how siblings are sampled: "without" replacement; "independent"; "greedy": all but one are the
    likeliest tokens, and one is sampled from the others (Hu et al. 2025, arXiv 2502.18779).
    """

    def __init__(
        self, row: Row, base: int, budget: Budget, siblings: int, draws: str = "without", **level: Any
    ) -> None:
        """level: as of `LevelBuilder`."""
        super().__init__(row, base, budget, repeats=draws == "independent", **level)
        self.siblings, self.greedy = siblings, draws == "greedy"

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
            q = distributions[parent]
            if self.greedy and count > 1:
                self.frontier += self._add_likeliest(parent, q, count, children)
            else:
                self.frontier += self.add_samples(parent, self.add_distribution(q), count, children)

    def _add_likeliest(self, parent: int, q: Tensor, count: int, children: Children) -> list[int]:
        """Add a sample of q without the likeliest count - 1 tokens, then these.

        The sample comes first, so that it is compared with all of p.  A token after its rejection may be one
        of the likeliest, and is accepted then.  In the other order p would lose their share before.
        """
        probs, tokens = q.topk(min(count - 1, len(q)))
        rest = q.index_fill(0, tokens, 0.0)
        added: list[int] = []
        if (mass := float(rest.sum())) > 0:
            added = self.add_samples(parent, self.add_distribution(rest / mass), 1, children, [mass])
        likeliest = zip(tokens.tolist(), probs.tolist())
        return added + [self.add(parent, token, prob) for token, prob in likeliest if prob > 0]

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
