"""A tree by ranks: which ranks of which level are worth a node, by how often each was right.

The expected number of accepted tokens of a tree is the sum over its nodes of the product of the accuracies along their paths, so the
best tree of n nodes has the n largest products (Medusa, arXiv 2401.10774): it is found by taking the best node that is left.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Collection, Sequence

from outrider.core.tree import ROOT, DraftTree
from outrider.heads.templates import Path

LEARN = 0.02


class Worth:
    """worth[level][rank]: how often the guess of that rank was right where its parent was."""

    def __init__(self, worth: Sequence[Sequence[float]]) -> None:
        self.worth = [list(level) for level in worth]

    @staticmethod
    def fading(
        levels: int, ranks: int, first: float = 0.5, by_level: float = 0.85, by_rank: float = 0.4
    ) -> Worth:
        """Before anything was seen."""
        return Worth(
            [[first * by_level**level * by_rank**rank for rank in range(ranks)] for level in range(levels)]
        )

    def best(
        self, nodes: int, depth: int, allowed: Collection[Path] | None = None, least: float = 0.0
    ) -> list[Path]:
        """The paths of the best tree of at most so many nodes and levels, best first, a parent before its children.

        allowed: only these (a published tree); every parent of one is among them.  least: no path that is less likely to be right.
        """
        depth, found = min(depth, len(self.worth)), list[Path]()
        waiting: list[tuple[float, int, Path]] = []

        def offer(path: Path, above: float) -> None:
            level = len(path) - 1
            if level < depth and path[-1] < len(self.worth[level]) and (allowed is None or path in allowed):
                joint = above * self.worth[level][path[-1]]
                if joint >= least:
                    heapq.heappush(waiting, (-joint, len(path), path))

        offer((0,), 1.0)
        while waiting and len(found) < nodes:
            joint, _, path = heapq.heappop(waiting)
            found.append(path)
            offer((*path, 0), -joint)
            worth = self.worth[len(path) - 1][path[-1]]
            offer((*path[:-1], path[-1] + 1), -joint / worth if worth else 0.0)
        return found

    def learn(self, tree: DraftTree, said: Sequence[int]) -> None:
        """tree: as the head proposed it, siblings by rank, whatever of it was verified.  said: the tokens that followed.  Along their path
        every guess was right or not.  Siblings that were drawn stand in the order of the draws, which says nothing of ranks."""
        if tree.distributions:
            return
        node, ranks = ROOT, ranks_of(tree)
        for row, token in zip(self.worth, said):
            children = [child for child, parent in enumerate(tree.parents) if parent == node]
            right = next((child for child in children if tree.tokens[child] == token), None)
            for child in children:
                if ranks[child] < len(row):
                    row[ranks[child]] += LEARN * ((child == right) - row[ranks[child]])
            if right is None:
                return
            node = right


def ranks_of(tree: DraftTree) -> list[int]:
    """Of every node among its siblings."""
    seen, found = Counter[int](), list[int]()
    for parent in tree.parents:
        found.append(seen[parent])
        seen[parent] += 1
    return found
