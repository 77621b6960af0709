"""Shapes of trees by rank: how often a draft token of each rank was right decides which nodes a tree gets.

The expected number of accepted tokens is the sum over all nodes of the product of the accuracies along
their paths.  So the best tree of n nodes has the n largest products (Medusa, arXiv 2401.10774), found best
first.
"""

from __future__ import annotations

import heapq
import itertools
from collections import Counter
from collections.abc import Collection, Sequence
from functools import lru_cache

from outrider.core.tree import ROOT, DraftTree
from outrider.drafting.trees.builder import RANK_CONFIDENCE, SAMPLE_CONFIDENCE
from outrider.heads.templates import Path

RATE = 0.02  # of the exponential moving average


class RankAccuracy:
    """accuracy[level][rank]: how often the node of that rank was right where its parent was, a moving
    average.
    """

    def __init__(self, accuracy: Sequence[Sequence[float]]) -> None:
        self.accuracy = [list(level) for level in accuracy]

    @staticmethod
    def prior(levels: int, ranks: int) -> RankAccuracy:
        """Estimates before any measurement."""
        return RankAccuracy(
            [[0.5 * 0.85**level * 0.4**rank for rank in range(ranks)] for level in range(levels)]
        )

    def best_paths(self, nodes: int, depth: int, allowed: Collection[Path] | None = None) -> list[Path]:
        """Paths of ranks of the best tree with at most this many nodes and levels, best first, parents
        before children.

        allowed: choose among these only; it is closed under parents and smaller siblings.
        """
        depth, found = min(depth, len(self.accuracy)), list[Path]()
        heap: list[tuple[float, int, Path]] = []

        def push(path: Path, parent_joint: float) -> None:
            level = len(path) - 1
            if (
                level < depth
                and path[-1] < len(self.accuracy[level])
                and (allowed is None or path in allowed)
            ):
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


def best_nodes(parents: Sequence[int], joint: Sequence[float], candidates: int, nodes: int) -> list[int]:
    """The nodes of the `candidates` likeliest paths, of these the `nodes` likeliest, ascending.

    joint: probability of the path to each node.  Parents are kept with their children.
    """
    inner = set(parents)
    leaves = sorted((i for i in range(len(parents)) if i not in inner), key=lambda i: -joint[i])
    kept: set[int] = set()
    for node in leaves[:candidates]:
        while node != ROOT and node not in kept:
            kept.add(node)
            node = parents[node]
    return sorted(sorted(kept, key=lambda i: (-joint[i], i))[:nodes])


@lru_cache(maxsize=64)
def product(top_k: tuple[int, ...]) -> list[Path]:
    """All paths of ranks where a node of level i has top_k[i] children, level by level."""
    levels = range(1, len(top_k) + 1)
    return [path for level in levels for path in itertools.product(*map(range, top_k[:level]))]


@lru_cache(maxsize=64)
def likeliest(top_k: tuple[int, ...], candidates: int, nodes: int, sampled: bool) -> list[Path]:
    """The best paths of `product`, by the probabilities of their ranks alone: a shape that is known before
    any token, and so may be sampled.
    """
    confidence, paths = SAMPLE_CONFIDENCE if sampled else RANK_CONFIDENCE, product(top_k)
    index: dict[Path, int] = {(): ROOT}
    joint: list[float] = []
    for node, path in enumerate(paths):
        index[path] = node
        parent = index[path[:-1]]
        joint.append((1.0 if parent == ROOT else joint[parent]) * confidence[path[-1]])
    parents = [index[path[:-1]] for path in paths]
    return [paths[node] for node in best_nodes(parents, joint, candidates, nodes)]
