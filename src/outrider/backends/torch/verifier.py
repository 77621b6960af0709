"""Verification of draft trees by `match` on a device: all nodes are picked, one copy returns the tokens."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from outrider.backends.rules import Answer, TreeQuery
from outrider.backends.torch import sampling
from outrider.core.noise import MASK, mix
from outrider.core.tree import ROOT


class TreeQueries:
    """Trees and, after `TreeVerifier.verify`, `picked`: the target's token after every row of the logits.

    A token is -1 where no logit is finite.
    """

    def __init__(self) -> None:
        self.trees: list[TreeQuery] = []
        self.picked: list[int] = []

    def add(self, query: TreeQuery) -> None:
        self.trees.append(query)

    def read(self) -> Iterator[tuple[int, Answer | None]]:
        for query in self.trees:
            yield query.key, self._walk(query)

    def _walk(self, query: TreeQuery) -> Answer | None:
        tree = query.tree
        child = dict(zip(zip(tree.parents, tree.tokens), range(tree.size)))
        accepted, emitted, node = list[int](), list[int](), ROOT
        while True:
            token = self.picked[query.root + 1 + node]
            if token < 0:
                return None
            emitted.append(token)
            if (node, token) not in child:
                return accepted, emitted
            node = child[node, token]
            accepted.append(node)


class TreeVerifier:
    """Only the picked tokens go to the host, in one copy; from `mps`, which has no float64, all logits do."""

    rules = ("match",)

    def queries(self, rule: str) -> TreeQueries:
        return TreeQueries()

    def verify(self, logits: Tensor, queries: TreeQueries) -> None:
        logits = sampling.with_float64(logits)
        tokens = logits.float().argmax(-1)  # the first of equal ones
        for query in queries.trees:
            if query.distribution.temperature > 0:
                for row, key in _keys(query):
                    tokens[row] = sampling.scores(logits[row], query.distribution, key).argmax()
        queries.picked = torch.where(logits.amax(-1).isfinite(), tokens, -1).tolist()


def _keys(query: TreeQuery) -> Iterator[tuple[int, int]]:
    """Rows of the logits after the root and each node, and the keys of their noise."""
    depths = [0]
    for parent in query.tree.parents[: query.tree.size]:
        depths.append(depths[parent + 1] + 1)
    for row, depth in enumerate(depths, query.root):
        yield row, mix(query.stream + query.position + depth & MASK)
