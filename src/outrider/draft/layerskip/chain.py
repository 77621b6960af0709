"""The draft of one row: a chain, each depth of which may have siblings that are not continued."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from outrider.core.row import Row
from outrider.core.step_input import StepInput
from outrider.core.tree import ROOT, Budget
from outrider.drafting.trees.builder import LevelBuilder
from outrider.drafting.view import View


class SiblingChain(LevelBuilder):
    """A chain with siblings, while it grows.

        root ─ trunk[0] ─ trunk[1] ─ …       the first node of each depth is the trunk
             ╰ sibling  ╰ sibling

    floor: a token less probable than this is the last one.  states: of the root and the trunk, where a pass
    computed them.
    """

    def __init__(self, row: Row, base: int, budget: Budget, floor: float) -> None:
        assert row.table is not None
        super().__init__(row, base, budget, View(row.table.slots, adapter=row.adapter))
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
