"""Draft trees.

The *root* (node -1) of a tree is the last known token of its row.  p is the target's distribution, q the
drafter's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

ROOT = -1


@dataclass(frozen=True, slots=True)
class Budget:
    """Maximum depth and number of nodes of a row's draft tree in one step.

    Invariant: 0 <= depth <= nodes, and both are 0 if either is.  A depth above `nodes` is reduced to it.
    floor: product of the confidences along a path below which it does not pay to draft behind it.
    """

    depth: int = 0
    nodes: int = 0
    floor: float = 0.0

    def __post_init__(self) -> None:
        if not 0 < self.depth <= self.nodes:
            depth = max(0, min(self.depth, self.nodes))
            object.__setattr__(self, "depth", depth)
            object.__setattr__(self, "nodes", self.nodes if depth else 0)

    def within(self, depth: int | None = None, nodes: int | None = None) -> Budget:
        """Budget reduced to this depth and number of nodes; None sets no limit."""
        deepest = self.depth if depth is None else min(self.depth, depth)
        most = self.nodes if nodes is None else min(self.nodes, nodes)
        return self if (deepest, most) == (self.depth, self.nodes) else Budget(deepest, most, self.floor)


NO_BUDGET = Budget()


class DraftTree(NamedTuple):
    """Draft tree of one row, as parallel lists over its nodes.

    tokens         token id of each node
    parents        parent of each node, parents[i] < i; -1 is the root
    confidence     drafter's confidence in each node
    distributions  distributions q that nodes were sampled from, float64 [V] each, on the CPU or where the
                   target's kernels verify them
    probs_of       index into `distributions` for each node; -1: chosen deterministically; empty: all were
    repeats        True: siblings are independent samples from q; False: sampled from q without replacement
    probes         number of last nodes that are evaluated but never accepted, so that a drafter learns what
                   the target would emit there (so far only lookahead decoding)
    source         index into `Joined.sources` of the drafter of each node; empty: all are of the first
    proposers      drafters of a mix that proposed each node, as bit sets; empty: there is one drafter
    """

    tokens: list[int]
    parents: list[int]
    confidence: list[float]
    distributions: Sequence[Tensor] = ()
    probs_of: Sequence[int] = ()
    repeats: bool = False
    probes: int = 0
    source: Sequence[int] = ()
    proposers: Sequence[int] = ()

    @staticmethod
    def chain(tokens: list[int], confidence: list[float]) -> DraftTree:
        """A chain of chosen tokens from the root."""
        return DraftTree(tokens, [*range(ROOT, len(tokens) - 1)], confidence)

    @property
    def chained(self) -> bool:
        """Whether the tree is a chain: the parent of every node is the node before it."""
        parents = self.parents
        return not parents or parents == [*range(ROOT, len(parents) - 1)]

    @property
    def size(self) -> int:
        """Number of nodes that may be accepted."""
        return len(self.tokens) - self.probes

    @property
    def depths(self) -> list[int]:
        """Depth of every node, 1 for a child of the root."""
        found = [0]  # of the root, then of the nodes
        for parent in self.parents:
            found.append(found[parent + 1] + 1)
        return found[1:]

    def only(self, keep: Sequence[int]) -> DraftTree:
        """Subtree of the nodes `keep`, ascending and closed under parents."""
        new_number = {node: number for number, node in enumerate(keep)}
        new_number[ROOT] = ROOT
        return self._replace(
            tokens=[self.tokens[node] for node in keep],
            parents=[new_number[self.parents[node]] for node in keep],
            confidence=[self.confidence[node] for node in keep],
            probs_of=[self.probs_of[node] for node in keep] if self.probs_of else (),
            probes=sum(node >= self.size for node in keep),
            source=[self.source[node] for node in keep] if self.source else (),
            proposers=[self.proposers[node] for node in keep] if self.proposers else (),
        )

    def source_of(self, node: int) -> int:
        """Index into `Joined.sources` of the drafter of a node."""
        return self.source[node] if self.source else 0

    def distribution(self, node: int) -> Tensor | None:
        """Distribution q that `node` was sampled from, before removal of siblings; None if chosen."""
        return self.distributions[self.probs_of[node]] if self.probs_of and self.probs_of[node] >= 0 else None


EMPTY_TREE = DraftTree([], [], [])


class Resume(NamedTuple):
    """Partial target forward computed by the drafter; verification resumes at layer `layer`.

    layer   first layer that is still to be computed
    states  [m, hidden], the residual stream before that layer, for the nodes of row 0, 1, … in order
    nodes   nodes[r] of row r, ascending; ROOT is the last known token

    K/V of the layers below is in the step's slots of these nodes.  All values equal the target's own bit for
    bit.
    """

    layer: int
    states: Tensor
    nodes: list[list[int]]

    def cut(self, r: int, size: int) -> Resume:
        """The forward of what is left when row r keeps only its first `size` nodes."""
        first, own = sum(map(len, self.nodes[:r])), self.nodes[r]
        stay = [node for node in own if node < size]
        states = torch.cat([self.states[: first + len(stay)], self.states[first + len(own) :]])
        return Resume(self.layer, states, [*self.nodes[:r], stay, *self.nodes[r + 1 :]])


class Draft(NamedTuple):
    """Proposal of a drafter for one step: trees[r] is rooted at the last known token of row r of the batch.

    Deterministically chosen siblings hold distinct tokens.
    """

    trees: Sequence[DraftTree]
    resume: Resume | None = None
