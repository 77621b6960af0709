"""The draft of one row: a chain, each depth of which may have siblings that are not continued.

When to stop, and how many siblings to keep, follows the confidence of the draft (Draft & Verify, SWIFT).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from outrider.core.row import Row
from outrider.core.step_input import StepInput
from outrider.core.tree import ROOT, Budget
from outrider.drafting.threshold import adapt_threshold
from outrider.drafting.trees.builder import LevelBuilder
from outrider.drafting.view import View

# By whether the row is greedy.
AUTO = {True: 0.8, False: 0.5}  # initial threshold
SIBLINGS = {True: (3, 5, 8, 10), False: (1, 3, 5, 10)}  # for a confidence above each of BOUNDS, and below all
BOUNDS = (0.95, 0.8, 0.5)
TARGET = 0.9  # Draft & Verify's α


class SiblingChain(LevelBuilder):
    """A chain with siblings, while it grows.

        root ─ trunk[0] ─ trunk[1] ─ …       the first node of each depth is the trunk
             ╰ sibling  ╰ sibling

    floor: a token less probable than this is the last one.  states: of the root and the trunk, where a pass
    computed them.
    """

    def __init__(self, row: Row, base: int, budget: Budget, floor: float) -> None:
        super().__init__(row, base, budget, View(row.slots, adapter=row.adapter))
        self.floor = floor
        self.trunk: list[int] = []
        self.states: list[Tensor] = []

    @property
    def path(self) -> list[int]:
        """The tokens of the trunk."""
        return [self.tokens[i] for i in self.trunk]

    def extend(
        self,
        tokens: Sequence[int],
        confidence: Sequence[float],
        probability: float = 0.0,
        distribution: Tensor | None = None,
    ) -> None:
        """Add a depth and continue its first token if `probability`, that of the first token, is not below
        the floor.

        distribution: q, if the tokens were sampled from it.
        """
        parent = self.trunk[-1] if self.trunk else ROOT
        q = -1 if distribution is None else self.add_distribution(distribution)
        nodes = [self.add(parent, token, share, q) for token, share in zip(tokens, confidence)]
        self.trunk += nodes[:1]
        self.frontier = nodes[:1] if probability >= self.floor else []

    def add_to(self, step_input: StepInput) -> None:
        """Append the row of the next pass, in the slots that verification will use for the same node."""
        if self.trunk:
            super().add_to(step_input)
        else:
            self.view.chain(step_input, self.base - 1, self.row.tokens[self.base - 1 : self.base])


@dataclass
class ExitThreshold:
    """A row's exit threshold.  It adapts so that the share of accepted tokens is about TARGET.

    accepted: that share, smoothed.  depth: the depth that this step's draft may have.
    """

    value: float
    adapts: bool
    accepted: float = 0.0
    depth: int = 0

    def learn(self, drafted: int, accepted: int) -> None:
        if self.adapts:
            full, share = drafted >= self.depth, accepted / drafted
            self.value, self.accepted = adapt_threshold(self.value, self.accepted, share, full, TARGET)


def siblings_at(confidence: float, greedy: bool) -> int:
    """Number of siblings to keep for the probability of the best token."""
    return SIBLINGS[greedy][next((i for i, bound in enumerate(BOUNDS) if confidence > bound), len(BOUNDS))]
