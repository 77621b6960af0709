"""Shapes of trees: every node has as many children as its level says, and the likeliest paths of all are
kept.

Greedy drafts grow the whole product of the levels and then cut it by the network's probabilities, as IBM
does.  Where the noise decides, or drafts are sampled, the rank among siblings gives the probability.  The
shape is then known before any token, and only its nodes are grown.  A sampled node's presence must not
depend on its token.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import lru_cache

from outrider.core.tree import ROOT
from outrider.drafting.trees.builder import RANK_CONFIDENCE, SAMPLE_CONFIDENCE
from outrider.heads.templates import Path


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
    """The best paths of `product`, by the probabilities of their ranks alone."""
    confidence, paths = SAMPLE_CONFIDENCE if sampled else RANK_CONFIDENCE, product(top_k)
    index: dict[Path, int] = {(): ROOT}
    joint: list[float] = []
    for node, path in enumerate(paths):
        index[path] = node
        parent = index[path[:-1]]
        joint.append((1.0 if parent == ROOT else joint[parent]) * confidence[path[-1]])
    parents = [index[path[:-1]] for path in paths]
    return [paths[node] for node in best_nodes(parents, joint, candidates, nodes)]
