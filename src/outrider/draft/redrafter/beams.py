"""The beams of one row as a tree: what beams have in common is one node."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from outrider.core.row import Row
from outrider.core.tree import Budget, DraftTree
from outrider.drafting.trees.sampled import Tree
from outrider.heads.choose import Chooser
from outrider.heads.trees import sample_children, sources_of


class Beams(Tree):
    """Beam search: a level goes on with the `width` likeliest continuations of its beams; every prefix is
    a node.

    The likeliest nodes of all levels are kept, as many as the budget has.  A beam that is not among them
    can have no child among them, and ends.

    sampled: a level has at most `width` sampled children, and no more than leaves the same number to the
    levels below.
    """

    def __init__(self, row: Row, budget: Budget, width: int, sampled: bool, stream_id: int) -> None:
        siblings = min(width, max(1, budget.nodes // budget.depth)) if sampled else width
        room = budget if sampled else Budget(budget.depth, width * budget.depth)
        super().__init__(row, 0, room, siblings, stream_id=stream_id)  # the nodes have no K/V
        self.sampled, self.max_nodes = sampled, budget.nodes
        self.sources: Sequence[int] = [0]

    @property
    def frontier_tokens(self) -> list[int]:
        """The input tokens of the next forward."""
        return [self.token(node) for node in self.frontier]

    def add_level(self, choose: Chooser, logits: Tensor) -> None:
        """Add the next level, from float32 [rows of the last forward, V]; `sources` is empty where it was
        the last.
        """
        parents = self.frontier
        if self.sampled:
            sample_children(self, choose, logits)
        else:
            paths = [self.path_tokens(node) for node in parents]
            self._search(parents, *choose.best(self.row, paths, logits, self.siblings))
            likeliest = self._likeliest()
            self.frontier = [node for node in self.frontier if node in likeliest]
        self.sources = sources_of(self, parents)

    def _search(self, parents: Sequence[int], found: Tensor, probs: Tensor) -> None:
        """Add the likeliest of the tokens [parents, k] by joint probability; -1 is none."""
        tokens, shares = found.numpy(), probs.numpy()
        joint = np.where(tokens >= 0, shares * np.array([[self.joint[node]] for node in parents]), 0.0)
        best = np.argsort(-joint, axis=None, kind="stable")[: self.siblings]
        rows, ranks = np.unravel_index(best, joint.shape)
        self.choose(
            (parents[r], int(tokens[r, k]), float(shares[r, k]))
            for r, k in zip(rows, ranks)
            if joint[r, k] > 0
        )

    def _likeliest(self) -> set[int]:
        """The nodes to keep.  Their parents are among them: none is less likely than its child, nor added
        after it.
        """
        ranked = sorted(range(len(self.tokens)), key=lambda node: -self.joint[node])
        return set(ranked[: self.max_nodes])

    @property
    def draft_tree(self) -> DraftTree:
        tree = super().draft_tree
        return tree if self.sampled else tree.only(sorted(self._likeliest()))
