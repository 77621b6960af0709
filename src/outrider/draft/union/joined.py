"""The configured drafter with the automatic ones beside it, for rows with a grammar.

Text that is certain comes first, and a drafter of texts continues behind it.  Others draft for the rows
without such text.  Draft tokens that the grammar forbids are dropped before they are verified.  Batches
without a grammar are passed on as they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from outrider.control import Controller
from outrider.core.processor import Grammar, Ids
from outrider.core.row import Row
from outrider.core.step import Batch, Commit, RowStep
from outrider.core.tree import EMPTY_TREE, NO_BUDGET, ROOT, Budget, Draft, DraftTree
from outrider.draft.union import after_trim, part
from outrider.drafting.base import Drafter, TextDrafter

SHORTEST = 2  # certain tokens that replace the draft of a model: a single one is not worth its step


@dataclass
class Proposal:
    """What is proposed for a row.

    tree: the proposed tree, `certain` tokens and then what is left of `own`.
    own: tree of the configured drafter.  node_of: node of `own` -> node of `tree`, if it was kept.
    """

    tree: DraftTree
    own: DraftTree
    node_of: dict[int, int]


class Joined:
    """`budgets`, `propose` and `observe` of a step, in this order."""

    def __init__(self, drafter: Drafter, automatic: Sequence[TextDrafter]) -> None:
        self.drafter, self.automatic = drafter, automatic
        self.text_drafter = drafter if isinstance(drafter, TextDrafter) else None
        self.certain: dict[Row, DraftTree] = {}  # of this step
        self.proposals: list[Proposal] | None = None  # of this step; None: the configured drafter's own

    @property
    def sources(self) -> Sequence[str]:
        """Names of the methods that draft: of the configured drafter, then of the automatic ones."""
        return [*self.drafter.sources, *(name for drafter in self.automatic for name in drafter.sources)]

    def budgets(self, batch: Batch, controller: Controller) -> list[Budget]:
        """The controller's budgets, raised to the certain text of each row."""
        budgets, self.certain = controller.budget(batch), {}
        if not any(step.row.grammar for step in batch) or not controller.nodes(len(batch)):
            return budgets
        for r, step in enumerate(batch):
            row, most = step.row, step.row.draft_depth
            if row.grammar is None or not step.emits or most < 1:
                continue
            certain = self._certain(row, most)
            if certain.size < (SHORTEST if budgets[r].nodes and self.text_drafter is None else 1):
                continue
            if not controller.forced(r):
                return budgets
            self.certain[row] = certain
            more = budgets[r] if self.text_drafter is not None else NO_BUDGET
            budgets[r] = Budget(min(most, certain.size + more.depth), certain.size + more.nodes)
        return budgets

    def _certain(self, row: Row, most: int) -> DraftTree:
        """Certain text of a row, as a chain of at most so many tokens."""
        for place, drafter in enumerate(self.automatic, start=len(self.drafter.sources)):
            depth = min(most, drafter.depth)
            if (tree := drafter.after(row, (), Budget(depth, depth))).tokens:
                return tree._replace(source=[place] * tree.size)
        return EMPTY_TREE

    def propose(self, batch: Batch) -> Draft:
        self.proposals = None
        if not any(step.row.grammar for step in batch):
            return self.drafter.propose(batch)
        others = batch.within([NO_BUDGET if step.row in self.certain else step.budget for step in batch])
        others.asker = batch.asker
        own = self.drafter.propose(others)
        self.proposals = [self._proposal(step, tree) for step, tree in zip(batch, own.trees)]
        return Draft([proposal.tree for proposal in self.proposals])

    def _proposal(self, step: RowStep, own: DraftTree) -> Proposal:
        row, budget = step.row, step.budget
        if row.grammar is None:
            return Proposal(own, own, {i: i for i in range(len(own.tokens))})
        certain = self.certain.get(row, EMPTY_TREE)
        certain = certain.only(range(min(certain.size, budget.depth)))
        rest = Budget(budget.depth - certain.size, budget.nodes - certain.size)
        if certain.size and rest.nodes and self.text_drafter is not None:
            own = self.text_drafter.after(row, certain.tokens, rest)
        return joined(row.grammar, row.tokens, certain, own)

    def observe(self, commit: Commit) -> None:
        if self.proposals is None:
            self.drafter.observe(commit)
            return
        steps = [
            part(step, proposal.own, after_trim(step, proposal.node_of), self.drafter.needs.topk)
            for step, proposal in zip(commit.batch, self.proposals)
        ]
        self.drafter.observe(commit._replace(batch=Batch(steps, prefill=commit.batch.prefill)))


def joined(grammar: Grammar, tokens: list[int], certain: DraftTree, own: DraftTree) -> Proposal:
    """A chain of certain tokens, and behind it the nodes of `own` that the grammar allows."""
    kept = grammar.allowed(Ids(tokens, certain.tokens), own) if own.tokens else ()
    behind, length = own if len(kept) == len(own.tokens) else own.only(kept), certain.size
    if not length or not kept:
        return Proposal(behind if kept else certain, own, {node: place for place, node in enumerate(kept)})
    parents = [length + parent if parent != ROOT else length - 1 for parent in behind.parents]
    tree = behind._replace(
        tokens=certain.tokens + behind.tokens,
        parents=certain.parents + parents,
        confidence=certain.confidence + behind.confidence,
        probs_of=[-1] * length + list(behind.probs_of) if behind.probs_of else (),
        source=[*certain.source, *map(behind.source_of, range(len(behind.tokens)))],
        proposers=[1] * length + list(behind.proposers) if behind.proposers else (),
    )
    return Proposal(tree, own, {node: length + place for place, node in enumerate(kept)})
