"""Token recycling (Luo et al. 2024, arXiv 2408.08696): draft from the target's own runners-up.

A table keeps, for every token, the ids with the largest logits when the target last predicted what follows
it.  Rejected nodes and all requests contribute; those of a cache_salt to a table of its own.  The published
tree of 80 nodes lists the ranks that may become nodes; the measured acceptance of each rank orders them.
"""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, ClassVar

from outrider.core.row import Row
from outrider.core.step import Batch, Commit, Needs
from outrider.core.tree import EMPTY_TREE, ROOT, Budget, Draft, DraftTree
from outrider.core.validate import Checked, Share, whole
from outrider.drafting.base import Target, TextDrafter
from outrider.drafting.salts import SaltedMemory
from outrider.drafting.trees.builder import TreeBuilder
from outrider.heads.ranks import Path, paths

RANKS = 8
JUDGED = 8  # rows of a step whose ranks are judged: they tell enough, and all of a large batch take long
RATE = 0.02  # of the moving average of a rank's acceptance
# The published tree: "01:3" means that the node reached by ranks 0 and 1 has children of ranks 0 to 2.
TREE = (
    "root:8 0:8 1:4 2:3 3:2 4:1 5:1 6:1 7:1 00:8 01:3 02:2 03:1 04:1 05:1 06:1 07:1 10:2 11:1 20:1 30:1 40:1 "
    "50:1 000:5 001:2 002:1 003:1 004:1 010:1 020:1 100:1 200:1 300:1 0000:3 0001:1 0002:1 0010:1 0100:1 "
    "1000:1 00000:2 00010:1"
)
PATHS = paths(TREE)
# Of each path: the place of its parent in [root, *PATHS], and its last rank.
STEPS = [([(), *PATHS].index(path[:-1]), path[-1]) for path in PATHS]


@dataclass
class SuccessorTable:
    """next: RANKS ids for every token, best first, -1 if unknown.  acceptance: of each rank."""

    next: array[int]
    acceptance: list[float] = field(default_factory=lambda: [0.4, 0.15, 0.08, 0.05, 0.04, 0.03, 0.025, 0.02])

    def after(self, token: int) -> array[int]:
        return self.next[token * RANKS : (token + 1) * RANKS]

    def put(self, token: int, ids: list[int]) -> None:
        if len(ids) == RANKS:
            self.next[token * RANKS : (token + 1) * RANKS] = array("i", ids)

    def put_first(self, token: int, successor: int) -> None:
        """Move a successor that occurred in a prompt to the first rank."""
        others = [i for i in self.after(token) if i != successor]
        self.put(token, [successor, *others[: RANKS - 1]])

    def learn(self, rank: int, right: bool) -> None:
        self.acceptance[rank] += RATE * (right - self.acceptance[rank])


class Recycle(TextDrafter):
    demo: ClassVar = {"token recycling": {}}
    tunable: ClassVar = {"nodes": (4, 16, 32), "min_token_prob": (0.02, 0.1, 0.2)}
    depth = max(map(len, PATHS))
    needs = Needs(topk=RANKS)

    @dataclass(frozen=True)
    class Options(Checked):
        """nodes: maximum size of a tree; None means the published 80, or 7 on a CPU, where every node costs
            time.
        min_token_prob: minimum joint probability of a node.
        """

        nodes: Annotated[int, whole(1, len(PATHS))] | None = None
        min_token_prob: Share = 0.05

    def __init__(self, options: Options, target: Target) -> None:
        super().__init__(options, target)
        self.nodes = target.nodes(options.nodes, len(PATHS))
        self.memory, self.turn = self._table(), 0
        self.salted = SaltedMemory(self._table)

    @classmethod
    def example(cls, target: Target) -> Recycle:
        """A drafter that proposes the whole tree, however improbable its nodes are."""
        return cls(cls.Options(nodes=len(PATHS), min_token_prob=0.0), target)

    def size(self, depth: int) -> int:
        return min(self.nodes, sum(len(path) <= depth for path in PATHS))

    def propose(self, batch: Batch) -> Draft:
        if not any(step.budget.nodes for step in batch):
            return Draft([EMPTY_TREE] * len(batch))
        order, trees = self._order(self.memory), list[DraftTree]()  # the order of all rows without a salt
        for step in batch:
            if step.row.cache_salt is None:
                trees.append(self._tree(step.row.tokens[-1], self.memory, order, step.budget))
            else:
                trees.append(self.after(step.row, (), step.budget))
        return Draft(trees)

    def after(self, row: Row, ahead: Sequence[int], budget: Budget) -> DraftTree:
        table = self._known(row)
        return self._tree(ahead[-1] if ahead else row.tokens[-1], table, self._order(table), budget)

    def _table(self) -> SuccessorTable:
        return SuccessorTable(array("i", [-1]) * (self.target.vocabulary * RANKS))

    def _known(self, row: Row) -> SuccessorTable:
        """The table that a row is drafted from, and contributes to."""
        table: SuccessorTable = self.memory if row.cache_salt is None else self.salted.of(row)
        return table

    def _order(self, table: SuccessorTable) -> list[Path]:
        """The nodes that are probable enough, most probable first.  Parents come before their children."""
        acceptance, least = table.acceptance, self.options.min_token_prob
        joint = [1.0]
        for parent, rank in STEPS:
            joint.append(joint[parent] * acceptance[rank])
        probable = [(path, p) for path, p in zip(PATHS, joint[1:]) if p >= least]
        return [path for path, _ in sorted(probable, key=lambda each: -each[1])]

    def _tree(self, last: int, table: SuccessorTable, order: list[Path], budget: Budget) -> DraftTree:
        """The tree after token `last`.  A rank without a known token has no node."""
        tree = TreeBuilder(budget.within(nodes=self.nodes))
        # path -> (its node, the successors of that node's token)
        placed: dict[Path, tuple[int, array[int]]] = {(): (ROOT, table.after(last))}
        for path in order:
            if not tree.room:
                break
            if len(path) > budget.depth or path[:-1] not in placed:
                continue
            parent, successors = placed[path[:-1]]
            token = successors[path[-1]]
            if token >= 0:
                node = tree.add(parent, token, table.acceptance[path[-1]])
                placed[path] = node, table.after(token)
        return tree.draft_tree

    def observe(self, commit: Commit) -> None:
        emitting = [step for step in commit.batch if step.emitted]
        # in turns; odd, so that two or four batches that alternate have all their rows judged, too
        every = -(-len(emitting) // JUDGED) | 1
        for step in emitting[self.turn % every :: every]:
            self._judge(self._known(step.row), step.row.tokens[step.end - 1], step.emitted)
        self.turn += 1
        for step in commit.batch:
            table, known = self._known(step.row), step.row.tokens[step.start : step.end]
            for token, successor in itertools.pairwise(known):
                table.put_first(token, successor)
            for token, ids in zip([known[-1], *step.tree.tokens], step.topk):
                table.put(token, ids)

    def forget(self, row: Row, reason: str) -> None:
        self.salted.forget(row)

    @staticmethod
    def _judge(table: SuccessorTable, last: int, emitted: Sequence[int]) -> None:
        """Learn which ranks were right for the tokens that were emitted after `last`.

        All ranks are judged, drafted or not: one that fails for a while would else never be tried again.
        """
        for token in emitted:
            for rank, successor in enumerate(table.after(last)):
                if successor >= 0:
                    table.learn(rank, successor == token)
            last = token
