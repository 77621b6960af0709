"""The guesses of one row while they grow: a chain, each level of which may keep siblings that are not extended."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from outrider.core.row import Row
from outrider.core.step_input import StepInput
from outrider.core.tree import ROOT, Budget, DraftTree


@dataclass
class Comb:
    row: Row
    base: int  # position of the first guess
    budget: Budget
    floor: float  # a guess less likely than this is the last one
    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    confidence: list[float] = field(default_factory=list)
    distributions: list[Tensor] = field(default_factory=list)
    trunk: list[int] = field(default_factory=list)  # the node of every level that the next one hangs from
    states: list[Tensor] = field(
        default_factory=list
    )  # what the root and the nodes of the trunk were read from
    growing: bool = True

    @property
    def draft_tree(self) -> DraftTree:
        draft_tree = DraftTree(self.tokens, self.parents, self.confidence)
        if not self.distributions:
            return draft_tree
        return draft_tree._replace(
            distributions=self.distributions,
            probs_of=[self.trunk.index(p) + 1 if p != ROOT else 0 for p in self.parents],
        )

    @property
    def path(self) -> list[int]:
        """The tokens that the next level comes after."""
        return [self.tokens[i] for i in self.trunk]

    @property
    def room(self) -> int:
        return self.budget.nodes - len(self.tokens)

    def add(
        self,
        tokens: Sequence[int],
        confidence: Sequence[float],
        best: float = 0.0,
        distribution: Tensor | None = None,
    ) -> None:
        """A level, whose first token goes on; `best` is how likely that one is.  law: what all of them were drawn from."""
        first = len(self.tokens)
        self.tokens += tokens
        self.parents += [self.trunk[-1] if self.trunk else ROOT] * len(tokens)
        self.confidence += confidence
        self.distributions += [] if distribution is None else [distribution]
        self.trunk += [first] if tokens else []
        self.growing = (
            bool(tokens) and len(self.trunk) < self.budget.depth and self.room > 0 and best >= self.floor
        )

    def add_to(self, step_input: StepInput) -> None:
        """The row that the next level is read from, in the slots where verification will look for the same node."""
        assert self.row.table is not None
        slots, first = self.row.table.slots, step_input.length
        if self.trunk:
            step_input.node(
                slots, self.base, [slots[self.base + i] for i in self.trunk], self.tokens[self.trunk[-1]]
            )
        else:
            step_input.chain(slots, self.base - 1, self.row.tokens[self.base - 1 : self.base])
        if self.row.adapter is not None:
            step_input.adapt(first, self.row.adapter)
