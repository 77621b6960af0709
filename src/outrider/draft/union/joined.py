"""The configured drafter and the automatic ones, for requests with a grammar or a predicted output.

- Text that a grammar makes certain comes first.  A configured `TextDrafter` continues after it.
- A predicted output replaces the draft of the configured drafter.
- The configured drafter drafts for all other rows.

Draft tokens that a grammar forbids are dropped before they are verified.  Batches without such requests go to
the configured drafter unchanged.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from outrider.control import Controller
from outrider.core.clock import Times
from outrider.core.processor import Grammar, Ids
from outrider.core.row import Row
from outrider.core.step import Batch, Commit, RowStep
from outrider.core.tree import EMPTY_TREE, NO_BUDGET, ROOT, Budget, Draft, DraftTree
from outrider.draft.union import after_trim, part
from outrider.drafting.base import Drafter, TextDrafter

SHORTEST = 2  # tokens that replace the draft of a model: a single one is not worth its step


class Given(NamedTuple):
    """Chain that an automatic drafter, the one of this number, proposes for a row."""

    tree: DraftTree = EMPTY_TREE
    drafter: int = -1


NOTHING = Given()


@dataclass
class Proposal:
    """What is proposed for a row.

    tree: the proposed tree: of `given`, and then what is left of `own`.
    own: tree of the configured drafter.  node_of, given_of: node of `own`, of `given` -> node of `tree`, if
    it was kept.
    """

    tree: DraftTree
    own: DraftTree
    node_of: dict[int, int]
    given: Given = NOTHING
    given_of: dict[int, int] = field(default_factory=dict)


class Learner(Protocol):
    """Goes on training a drafter: see online/learner.py."""

    def train(self) -> None: ...
    def observe(self, commit: Commit) -> None: ...
    def forget(self, row: Row) -> None: ...
    def taken(self) -> float: ...
    def charged(self, times: Times) -> Times: ...


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
        self.given: dict[Row, Given] = {}  # of this step
        self.proposals: dict[Row, Proposal] = {}  # of guided batches that are not observed yet

    def budgets(self, batch: Batch, controller: Controller) -> list[Budget]:
        """The controller's budgets, raised to what the automatic drafters propose for each row."""
        budgets, self.given = controller.budget(batch), {}
        self.guided = True in [step.row.guided for step in batch]
        if not self.guided or not controller.nodes(len(batch)):
            return budgets
        for r, step in enumerate(batch):
            row, most = step.row, step.row.draft_depth
            if not row.guided or not step.emits or most < 1:
                continue
            given = self._given(row, most)
            if given.tree.size < (SHORTEST if budgets[r].nodes and self.text_drafter is None else 1):
                continue
            if not controller.forced(r):
                return budgets
            self.given[row] = given
            more = budgets[r] if self._goes_on(given) else NO_BUDGET
            budgets[r] = Budget(min(most, given.tree.size + more.depth), given.tree.size + more.nodes)
        return budgets

    def _given(self, row: Row, most: int) -> Given:
        """The chain, of at most so many tokens, of the first automatic drafter that has one for a row."""
        for number, drafter in enumerate(self.automatic):
            depth = min(most, drafter.depth)
            if (tree := drafter.after(row, (), Budget(depth, depth))).tokens:
                source = len(self.drafter.sources) + number
                return Given(tree._replace(source=[source] * tree.size), number)
        return NOTHING

    def _goes_on(self, given: Given) -> bool:
        """Whether the configured drafter drafts behind such a chain."""
        return self.text_drafter is not None and self.automatic[given.drafter].certain

    def propose(self, batch: Batch) -> Draft:
        if self.learner is not None:
            self.learner.train()
        if not self.guided:
            return self.drafter.propose(batch)
        others = batch.within([NO_BUDGET if step.row in self.given else step.budget for step in batch])
        others.asker = batch.asker
        own = self.drafter.propose(others)
        proposals = [self._proposal(step, tree) for step, tree in zip(batch, own.trees)]
        self.proposals.update(zip(batch.rows, proposals))
        return Draft([proposal.tree for proposal in proposals])

    def _proposal(self, step: RowStep, own: DraftTree) -> Proposal:
        row, budget, given = step.row, step.budget, self.given.get(step.row, NOTHING)
        length = min(given.tree.size, budget.depth)
        given = given._replace(tree=given.tree.only(range(length)))
        rest = Budget(budget.depth - length, budget.nodes - length)
        if length and rest.nodes and self.text_drafter is not None and self._goes_on(given):
            own = self.text_drafter.after(row, given.tree.tokens, rest)
        if row.grammar is not None and length and not self.automatic[given.drafter].certain:
            allowed = row.grammar.allowed(Ids(row.tokens), given.tree)
            given = given._replace(tree=given.tree.only(allowed))
        return joined(row.grammar, row.tokens, given, own)

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
            judged = len(step.accepted) >= proposal.given.tree.size
            verified = after_trim(step, proposal.node_of) if judged else {}
            steps.append(part(step, proposal.own, verified, self.drafter.needs.topk))
            if proposal.given.tree.size:
                own = part(step, proposal.given.tree, after_trim(step, proposal.given_of), 0)
                self.automatic[proposal.given.drafter].observe(Commit(Batch([own])))
        self.drafter.observe(commit._replace(batch=Batch(steps, prefill=commit.batch.prefill)))

    def forget(self, row: Row, reason: str) -> None:
        self.proposals.pop(row, None)
        for drafter in (self.drafter, *self.automatic):
            drafter.forget(row, reason)
        if self.learner is not None:
            self.learner.forget(row)

    def taken(self) -> float:
        """Seconds of `propose` that learning took."""
        return 0.0 if self.learner is None else self.learner.taken()

    def charged(self, times: Times) -> Times:
        """The times of a step without learning, with a share of its cost."""
        return times if self.learner is None else self.learner.charged(times)


def joined(grammar: Grammar | None, tokens: list[int], given: Given, own: DraftTree) -> Proposal:
    """A given chain, and behind it the nodes of `own` that the grammar allows."""
    chain, length = given.tree, given.tree.size
    kept: Sequence[int] = range(len(own.tokens))
    if grammar is not None and kept:
        kept = grammar.allowed(Ids(tokens, chain.tokens), own)
    behind = own if len(kept) == len(own.tokens) else own.only(kept)
    node_of = {node: length + place for place, node in enumerate(kept)}
    given_of = {node: node for node in range(length)}
    if not length or not kept:
        return Proposal(behind if kept else chain, own, node_of, given, given_of)
    parents = [length + parent if parent != ROOT else length - 1 for parent in behind.parents]
    tree = behind._replace(
        tokens=chain.tokens + behind.tokens,
        parents=chain.parents + parents,
        confidence=chain.confidence + behind.confidence,
        probs_of=[-1] * length + list(behind.probs_of) if behind.probs_of else (),
        source=[*chain.source, *map(behind.source_of, range(len(behind.tokens)))],
        proposers=[1] * length + list(behind.proposers) if behind.proposers else (),
    )
    return Proposal(tree, own, node_of, given, given_of)
