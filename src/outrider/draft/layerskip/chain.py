"""The draft of one row: a chain, each depth of which may have siblings that are not continued."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from outrider.core.row import Row
from outrider.core.step_input import StepInput
from outrider.core.tree import ROOT, Budget, DraftTree


@dataclass
class SiblingChain:
    """A chain with siblings, while it grows.

        root ─ trunk[0] ─ trunk[1] ─ …       the first node of each depth is the trunk
             ╰ sibling  ╰ sibling

    base: position of the first draft token.  floor: a token less probable than this is the last one.
    states: of the root and the trunk, where a pass computed them.
    """

    row: Row
    base: int
    budget: Budget
    floor: float
    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    confidence: list[float] = field(default_factory=list)
    distributions: list[Tensor] = field(default_factory=list)
    trunk: list[int] = field(default_factory=list)
    states: list[Tensor] = field(default_factory=list)
    growing: bool = True

    @property
    def draft_tree(self) -> DraftTree:
        draft_tree = DraftTree(self.tokens, self.parents, self.confidence)
        if not self.distributions:
            return draft_tree
        depth_of = {parent: depth for depth, parent in enumerate([ROOT, *self.trunk])}
        probs_of = [depth_of[parent] for parent in self.parents]
        return draft_tree._replace(distributions=self.distributions, probs_of=probs_of)

    @property
    def path(self) -> list[int]:
        """The tokens of the trunk."""
        return [self.tokens[i] for i in self.trunk]

    @property
    def room(self) -> int:
        return self.budget.nodes - len(self.tokens)

    def add(
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
        first = len(self.tokens)
        self.tokens += tokens
        self.parents += [self.trunk[-1] if self.trunk else ROOT] * len(tokens)
        self.confidence += confidence
        self.distributions += [] if distribution is None else [distribution]
        self.trunk += [first] if tokens else []
        has_room = len(self.trunk) < self.budget.depth and self.room > 0
        self.growing = bool(tokens) and has_room and probability >= self.floor

    def add_to(self, step_input: StepInput) -> None:
        """Append the row of the next pass, in the slots that verification will use for the same node."""
        assert self.row.table is not None
        slots, first = self.row.table.slots, step_input.length
        if self.trunk:
            path = [slots[self.base + i] for i in self.trunk]
            step_input.node(slots, self.base, path, self.tokens[self.trunk[-1]])
        else:
            step_input.chain(slots, self.base - 1, self.row.tokens[self.base - 1 : self.base])
        if self.row.adapter is not None:
            step_input.adapt(first, self.row.adapter)
