"""The beams of one row, as a tree in which what beams have in common is one node."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import numpy as np
from torch import Tensor

from outrider.core.row import Row
from outrider.core.tree import Budget, DraftTree
from outrider.drafting.trees.sampled import Tree
from outrider.drafting.view import View
from outrider.heads.choose import Chooser


class Beams:
    """A level goes on with the `width` likeliest of all that may follow its beams, and every prefix of a beam is a node.  The likeliest
    nodes of all levels stay, as many as the budget has; a beam that fell out of these can have no child among them, and goes on no more.

    Where guesses are drawn instead, a level has `width` children at most, but no more than leaves the levels below as many.
    """

    def __init__(self, row: Row, budget: Budget, width: int, drawn: bool, stream_id: int) -> None:
        self.row, self.nodes, self.width, self.drawn = row, budget.nodes, width, drawn
        siblings = min(width, max(1, budget.nodes // budget.depth)) if drawn else width
        room = budget if drawn else Budget(budget.depth, width * budget.depth)
        self.tree = Tree(
            row, 0, room, siblings, View(array("i")), stream_id=stream_id
        )  # its nodes have no K/V
        self.sources: Sequence[int] = [
            0
        ]  # for every row of the next forward, which row of the last one its parent was

    @property
    def said(self) -> list[int]:
        """What the rows of the next forward read."""
        return [self.tree.tokens[node] if node >= 0 else self.row.tokens[-1] for node in self.tree.frontier]

    def take(self, choose: Chooser, logits: Tensor) -> None:
        """The next level, from float32 [rows of the last forward, V]; `sources` is empty where it was the last."""
        tree, above = self.tree, list(self.tree.frontier)
        if self.drawn:
            distributions = {
                node: choose.distribution(self.row, tree.path_tokens(node), logits[i])
                for i, node in enumerate(above)
            }
            tree.draw(
                {
                    node: distribution
                    for node, distribution in distributions.items()
                    if distribution is not None
                }
            )
        else:
            self._search(
                above, *choose.best(self.row, [tree.path_tokens(node) for node in above], logits, self.width)
            )
            likeliest = self._likeliest()
            tree.frontier = [node for node in tree.frontier if node in likeliest]
        self.sources = [above.index(tree.parents[node]) for node in tree.frontier] if tree.growing else ()

    def _search(self, above: Sequence[int], found: Tensor, shares: Tensor) -> None:
        tokens, likely = found.numpy(), shares.numpy()
        joint = np.where(tokens >= 0, likely * np.array([[self.tree.joint[node]] for node in above]), 0.0)
        rows, ranks = np.unravel_index(
            np.argsort(-joint, axis=None, kind="stable")[: self.width], joint.shape
        )
        self.tree.choose(
            (above[r], int(tokens[r, k]), float(likely[r, k])) for r, k in zip(rows, ranks) if joint[r, k] > 0
        )

    def _likeliest(self) -> set[int]:
        """Parents are among them: no node is likelier than its own, nor made before it."""
        joint = self.tree.joint
        return set(sorted(range(len(self.tree.tokens)), key=lambda node: -joint[node])[: self.nodes])

    @property
    def draft_tree(self) -> DraftTree:
        return self.tree.draft_tree if self.drawn else self.tree.draft_tree.only(sorted(self._likeliest()))
