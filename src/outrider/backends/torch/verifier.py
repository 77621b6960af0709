"""Verification of draft trees by `match` on a device: all nodes are picked, one copy returns the tokens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from outrider.backends.rules import Answer, TreeQuery
from outrider.backends.torch import sampling
from outrider.core.device import HostCopy
from outrider.core.row import Row
from outrider.core.tree import ROOT, DraftTree

NO_TOKENS = HostCopy(torch.empty(0, dtype=torch.int64))


class TreeQueries:
    """Trees and, after `TreeVerifier.verify`, `picked`: the target's token after every row of the logits.

    A token is -1 where no logit is finite.
    """

    def __init__(self) -> None:
        self.trees: list[TreeQuery] = []
        self.picked = NO_TOKENS

    def add(self, key: int, row: Row, tree: DraftTree, root: int) -> None:
        self.trees.append(TreeQuery.of(key, row, tree, root))

    def values(self, key: int, nodes: Sequence[int]) -> None:
        """Log-probabilities are found by the sampler."""

    def read(self) -> Iterator[tuple[int, Answer | None]]:
        picked = self.picked.tolist()
        for query in self.trees:
            yield query.key, _walk(query, picked)


def _walk(query: TreeQuery, picked: list[int]) -> Answer | None:
    tree = query.tree
    child = dict(zip(zip(tree.parents, tree.tokens), range(tree.size)))
    accepted, emitted, node = list[int](), list[int](), ROOT
    while True:
        token = picked[query.root + 1 + node]
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
    processes = False

    def queries(self, rule: str) -> TreeQueries:
        return TreeQueries()

    def verify(self, logits: Tensor, queries: TreeQueries) -> None:
        asked = (
            (row, query.distribution, key)
            for query in queries.trees
            for row, key in enumerate(query.keys, query.root)
        )
        queries.picked = HostCopy(sampling.pick_next(sampling.with_float64(logits), asked))
