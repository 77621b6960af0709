"""Shapes of trees by rank: how often a draft token of each rank was right decides which nodes a tree gets.

The expected number of accepted tokens is the sum over all nodes of the product of the accuracies along
their paths.  So the best tree of n nodes has the n largest products (Medusa, arXiv 2401.10774), found best
first.

A node is its path of ranks; the children of a node have the ranks 0, 1, …  trees.json has the static trees
published with Medusa (for ranked heads) and EAGLE (for recurrent ones), as numbers of children per node.
For example, "root:2 0:1" has the nodes (0,), (1,) and (0, 0).
"""

from __future__ import annotations

import heapq
import json
import pathlib
from collections import Counter
from collections.abc import Collection, Sequence
from functools import lru_cache

from outrider.core.tree import ROOT, DraftTree

Path = tuple[int, ...]
_TREES = json.loads(pathlib.Path(__file__).with_name("trees.json").read_text(encoding="utf-8"))
MEDUSA: dict[str, str] = _TREES["ranked"]
EAGLE: dict[str, str] = _TREES["recurrent"]  # mc_sim_7b_63 has 25 nodes, despite its name
RATE = 0.02  # of the exponential moving average


class RankAccuracy:
    """Accuracy of draft tokens by rank.

    accuracy[level][rank]: moving average of how often that node was right where its parent was.
    """

    def __init__(self, accuracy: Sequence[Sequence[float]]) -> None:
        self.accuracy = [list(level) for level in accuracy]

    @staticmethod
    def prior(levels: int, ranks: int) -> RankAccuracy:
        """Estimates before any measurement."""
        firsts = [0.5 * 0.85**level for level in range(levels)]
        return RankAccuracy([[first * 0.4**rank for rank in range(ranks)] for first in firsts])

    def best_paths(self, nodes: int, depth: int, allowed: Collection[Path] | None = None) -> list[Path]:
        """Paths of ranks of the best tree with at most this many nodes and levels, best first, parents
        before children.

        allowed: choose among these only; it is closed under parents and smaller siblings.
        """
        depth, found = min(depth, len(self.accuracy)), list[Path]()
        heap: list[tuple[float, int, Path]] = []

        def push(path: Path, parent_joint: float) -> None:
            level = len(path) - 1
            known = level < depth and path[-1] < len(self.accuracy[level])
            if known and (allowed is None or path in allowed):
                heapq.heappush(heap, (-parent_joint * self.accuracy[level][path[-1]], len(path), path))

        push((0,), 1.0)
        while heap and len(found) < nodes:
            negative, _, path = heapq.heappop(heap)
            found.append(path)
            push((*path, 0), -negative)
            own = self.accuracy[len(path) - 1][path[-1]]
            push((*path[:-1], path[-1] + 1), -negative / own if own else 0.0)
        return found

    def update(self, tree: DraftTree, emitted: Sequence[int]) -> None:
        """Count the nodes along the path of the emitted tokens as right, and their siblings as wrong.

        tree: as proposed, siblings in the order of their ranks, whether or not all of it was verified.
        Sampled siblings are in the order of their samples, which is independent of ranks: such a tree is
        ignored.
        """
        if tree.distributions:
            return
        node, ranks = ROOT, ranks_of(tree)
        for accuracy, token in zip(self.accuracy, emitted):
            children = [child for child, parent in enumerate(tree.parents) if parent == node]
            right = next((child for child in children if tree.tokens[child] == token), None)
            for child in children:
                if ranks[child] < len(accuracy):
                    accuracy[ranks[child]] += RATE * ((child == right) - accuracy[ranks[child]])
            if right is None:
                return
            node = right


@lru_cache(maxsize=256)
def prior_paths(nodes: int, depth: int, ranks: int, allowed: frozenset[Path] | None = None) -> Sequence[Path]:
    """`best_paths` before any measurement."""
    return tuple(RankAccuracy.prior(depth, ranks).best_paths(nodes, depth, allowed))


def ranks_of(tree: DraftTree) -> list[int]:
    """The rank of every node among its siblings, in the order of the nodes."""
    counts, ranks = Counter[int](), list[int]()
    for parent in tree.parents:
        ranks.append(counts[parent])
        counts[parent] += 1
    return ranks


def chain_paths(levels: int) -> list[Path]:
    """A chain, as a tree with one node per level."""
    return [(0,) * level for level in range(1, levels + 1)]


def paths(text: str) -> list[Path]:
    """Nodes of a published tree, breadth first."""
    found: list[Path] = []
    for entry in text.split():
        path, _, children = entry.partition(":")
        parent = () if path == "root" else tuple(map(int, path))
        found.extend((*parent, rank) for rank in range(int(children)))
    return sorted(found, key=len)
