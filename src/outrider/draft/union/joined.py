"""The configured drafter and the automatic ones, for requests with a grammar or a predicted output.

- Text that a grammar makes certain comes first.  A configured `TextDrafter` continues after it.
- A predicted output replaces the draft of the configured drafter.
- The configured drafter drafts for all other rows.

Draft tokens that a grammar forbids are dropped before they are verified.  Batches without such requests go to
the configured drafter unchanged.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from outrider.control import Controller
from outrider.core.processor import Grammar, Ids
from outrider.core.row import Row
from outrider.core.step import Batch, Commit, RowStep
from outrider.core.tree import EMPTY_TREE, NO_BUDGET, ROOT, Budget, Draft, DraftTree
from outrider.draft.union import after_trim, part
from outrider.drafting.base import Drafter, TextDrafter

SHORTEST = 2  # tokens that replace the draft of a model: a single one is not worth its step


class AutomaticChain(NamedTuple):
    """Chain that an automatic drafter proposes for a row.  drafter: its number among the automatic ones."""

    tree: DraftTree = EMPTY_TREE
    drafter: int = -1


NO_CHAIN = AutomaticChain()


@dataclass
class Proposal:
    """Draft of a row: the chain of an automatic drafter, and behind it what is left of `own`.

    tree: the proposed tree.  own: that of the configured drafter.
    own_nodes: node of `own` -> node of `tree`, if it was kept.  Nodes of `chain` are the first ones of both.
    """

    tree: DraftTree
    own: DraftTree
    own_nodes: dict[int, int]
    chain: AutomaticChain = NO_CHAIN


class Learner(Protocol):
    """Training of a drafter while serving: see online/learner.py."""

    def train(self) -> None: ...
    def observe(self, commit: Commit) -> None: ...
    def forget(self, row: Row) -> None: ...


class Joined:
    """`budgets`, `propose` and `observe` of a step, in this order."""

    def __init__(
        self, drafter: Drafter, automatic: Sequence[TextDrafter], learner: Learner | None = None
    ) -> None:
        """learner: trains the configured drafter, which keeps the automatic ones that it is, or mixes."""
        self.drafter, self.learner = drafter, learner
        self.automatic = [each for each in automatic if not set(each.sources) & set(drafter.sources)]
        self.text_drafter = drafter if isinstance(drafter, TextDrafter) else None
        # names of the methods that draft: of the configured drafter, then of the automatic ones
        self.sources = [*drafter.sources, *(name for each in self.automatic for name in each.sources)]
        self.guided = False  # whether some row of this step is guided
        self.chains: dict[Row, AutomaticChain] = {}  # of this step
        self.proposals: dict[Row, Proposal] = {}  # of guided batches that are not observed yet

    def budgets(self, batch: Batch, controller: Controller) -> list[Budget]:
        """The controller's budgets, raised to what the automatic drafters propose for each row."""
        budgets, self.chains, self.guided = controller.budget(batch), {}, False
        for step in batch:
            if step.row.guided:
                self.guided = True
        if not self.guided or not controller.nodes(len(batch)):
            return budgets
        for r, step in enumerate(batch):
            row, most = step.row, step.row.draft_depth
            if not row.guided or not step.emits or most < 1:
                continue
            chain = self._chain(row, most)
            length = chain.tree.size
            if length < (SHORTEST if budgets[r].nodes and self.text_drafter is None else 1):
                continue
            if not controller.forced(r):
                return budgets
            self.chains[row] = chain
            more = budgets[r] if self._continues(chain) else NO_BUDGET
            budgets[r] = Budget(min(most, length + more.depth), length + more.nodes)
        return budgets

    def _chain(self, row: Row, most: int) -> AutomaticChain:
        """The chain, of at most so many tokens, of the first automatic drafter that has one for a row."""
        for number, drafter in enumerate(self.automatic):
            depth = min(most, drafter.depth)
            if (tree := drafter.after(row, (), Budget(depth, depth))).tokens:
                source = len(self.drafter.sources) + number
                return AutomaticChain(tree._replace(source=[source] * tree.size), number)
        return NO_CHAIN

    def _continues(self, chain: AutomaticChain) -> bool:
        """Whether the configured drafter drafts behind this chain."""
        return self.text_drafter is not None and self.automatic[chain.drafter].certain

    def propose(self, batch: Batch) -> Draft:
        if self.learner is not None:
            self.learner.train()
        if not self.guided:
            return self.drafter.propose(batch)
        others = batch.within([NO_BUDGET if step.row in self.chains else step.budget for step in batch])
        others.mix_budgets = batch.mix_budgets
        own = self.drafter.propose(others)
        proposals = [self._proposal(step, tree) for step, tree in zip(batch, own.trees)]
        self.proposals.update(zip(batch.rows, proposals))
        return Draft([proposal.tree for proposal in proposals])

    def _proposal(self, step: RowStep, own: DraftTree) -> Proposal:
        """The proposal for a row of a guided batch.  own: tree of the configured drafter."""
        row, budget, chain = step.row, step.budget, self.chains.get(step.row, NO_CHAIN)
        length = min(chain.tree.size, budget.depth)
        chain = chain._replace(tree=chain.tree.only(range(length)))
        rest = Budget(budget.depth - length, budget.nodes - length)
        if length and rest.nodes and self.text_drafter is not None and self._continues(chain):
            own = self.text_drafter.after(row, chain.tree.tokens, rest)
        if row.grammar is not None and length and not self.automatic[chain.drafter].certain:
            allowed = row.grammar.allowed(Ids(row.tokens), chain.tree)
            chain = chain._replace(tree=chain.tree.only(allowed))
        return proposal_behind(chain, own, row.grammar, row.tokens)

    def observe(self, commit: Commit) -> None:
        """Show each drafter its own part of the trees, without nodes behind a chain that was not accepted."""
        if self.learner is not None:
            self.learner.observe(commit)
        if not self.proposals or commit.batch[0].row not in self.proposals:
            self.drafter.observe(commit)
            return
        steps: list[RowStep] = []
        for step in commit.batch:
            proposal = self.proposals.pop(step.row)
            chain = proposal.chain
            judged = len(step.accepted) >= chain.tree.size
            verified = after_trim(step, proposal.own_nodes) if judged else {}
            steps.append(part(step, proposal.own, verified, self.drafter.needs.topk))
            if length := chain.tree.size:
                verified = after_trim(step, {node: node for node in range(length)})
                seen = part(step, chain.tree, verified, 0)
                self.automatic[chain.drafter].observe(Commit(Batch([seen])))
        self.drafter.observe(commit._replace(batch=Batch(steps, prefill=commit.batch.prefill)))

    def forget(self, row: Row, reason: str) -> None:
        self.proposals.pop(row, None)
        for drafter in (self.drafter, *self.automatic):
            drafter.forget(row, reason)
        if self.learner is not None:
            self.learner.forget(row)


def proposal_behind(
    chain: AutomaticChain, own: DraftTree, grammar: Grammar | None, tokens: list[int]
) -> Proposal:
    """The chain, and behind its last node the nodes of `own` that the grammar allows.

    tokens: of the row
    """
    length = chain.tree.size
    kept: Sequence[int] = range(len(own.tokens))
    if grammar is not None and kept:
        kept = grammar.allowed(Ids(tokens, chain.tree.tokens), own)
    behind = own if len(kept) == len(own.tokens) else own.only(kept)
    own_nodes = {node: length + place for place, node in enumerate(kept)}
    if not kept:
        tree = chain.tree
    elif not length:
        tree = behind
    else:
        tree = _appended(chain.tree, behind)
    return Proposal(tree, own, own_nodes, chain)


def _appended(chain: DraftTree, tree: DraftTree) -> DraftTree:
    """A tree whose root is the last node of a chain of chosen tokens, as one tree."""
    length = chain.size
    parents = [length + parent if parent != ROOT else length - 1 for parent in tree.parents]
    return tree._replace(
        tokens=chain.tokens + tree.tokens,
        parents=chain.parents + parents,
        confidence=chain.confidence + tree.confidence,
        probs_of=[-1] * length + list(tree.probs_of) if tree.probs_of else (),
        source=[*chain.source, *map(tree.source_of, range(len(tree.tokens)))],
        proposers=[1] * length + list(tree.proposers) if tree.proposers else (),
    )
