"""Draft trees.

A token tree hangs from the last certain token of a row, the *root* (node -1).  p is the target's distribution, q the
drafter's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

ROOT = -1


@dataclass(frozen=True, slots=True)
class Budget:
    """Draft tokens that one row may get in a step: levels of the tree, and nodes.

    0 <= depth <= nodes always holds, and both are 0 if either is: a depth that the nodes cannot fill is cut.
    """

    depth: int = 0
    nodes: int = 0

    def __post_init__(self) -> None:
        if not 0 < self.depth <= self.nodes:
            depth = max(0, min(self.depth, self.nodes))
            object.__setattr__(self, "depth", depth)
            object.__setattr__(self, "nodes", self.nodes if depth else 0)

    def within(self, depth: int | None = None, nodes: int | None = None) -> Budget:
        """The same with at most this depth and so many nodes; None sets no limit."""
        deepest = self.depth if depth is None else min(self.depth, depth)
        return Budget(deepest, self.nodes if nodes is None else min(self.nodes, nodes))


NO_BUDGET = Budget()


class DraftTree(NamedTuple):
    """The tree of one row, as lists: parents[i] < i, -1 = root.

    distributions, probs_of: node i was drawn from distributions[probs_of[i]] (float64 [V]) at its parent; -1 means it was
    chosen, and an empty probs_of that all were.  repeats: siblings of one distribution are independent draws; otherwise each
    is drawn from what is left of it without those before.  probes: the last so many nodes are there for what the target says
    after them, not to be accepted.
    """

    tokens: list[int]
    parents: list[int]
    confidence: list[float]
    distributions: Sequence[Tensor] = ()
    probs_of: Sequence[int] = ()
    repeats: bool = False
    probes: int = 0

    @staticmethod
    def chain(tokens: list[int], confidence: list[float]) -> DraftTree:
        return DraftTree(tokens, [*range(ROOT, len(tokens) - 1)], confidence)

    @property
    def chained(self) -> bool:
        """Whether every node hangs from the one before it."""
        return self.parents == [*range(ROOT, len(self.parents) - 1)]

    @property
    def size(self) -> int:
        """How many nodes may be accepted."""
        return len(self.tokens) - self.probes

    def only(self, keep: Sequence[int]) -> DraftTree:
        """These nodes, ascending; the parents of all are among them."""
        place = {ROOT: ROOT, **{node: at for at, node in enumerate(keep)}}
        return self._replace(
            tokens=[self.tokens[i] for i in keep],
            parents=[place[self.parents[i]] for i in keep],
            confidence=[self.confidence[i] for i in keep],
            probs_of=[self.probs_of[i] for i in keep] if self.probs_of else (),
            probes=sum(i >= self.size for i in keep),
        )

    def distribution(self, node: int) -> Tensor | None:
        """What `node` was drawn from, before any of its siblings; None if it was chosen."""
        return self.distributions[self.probs_of[node]] if self.probs_of and self.probs_of[node] >= 0 else None


EMPTY_TREE = DraftTree([], [], [])


class Resume(NamedTuple):
    """What the drafter has computed of the target's own forward, in the slots that this step gave it: verification begins there.

    states [m, hidden]: the residual stream before layer `layer`, of nodes[r] (ascending; ROOT is the last known token) of row 0, 1 …;
    K/V of the layers below is in the slots of these nodes.  Bit for bit what the target itself would compute.
    """

    layer: int
    states: Tensor
    nodes: list[list[int]]


class Draft(NamedTuple):
    """What a drafter proposes for one step: trees[r] hangs from the last known token of row r of the batch.

    Siblings that were chosen hold distinct tokens.
    """

    trees: Sequence[DraftTree]
    resume: Resume | None = None
