"""Token recycling (Luo et al. 2024, arXiv 2408.08696): the target's own runners-up are not thrown away.

A table keeps, for every token, the best ids that the target last saw after it, wherever that was: verified or not, right or wrong,
of any request.  The published tree of 80 nodes says which ranks are worth a node; how often each rank was right orders the nodes.
"""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from outrider.core.row import Row
from outrider.core.step import Batch, Commit, Needs
from outrider.core.tree import EMPTY_TREE, ROOT, Budget, Draft, DraftTree
from outrider.drafting.base import Drafter, Target
from outrider.errors import ConfigError
from outrider.heads.templates import Path, paths

RANKS = 8
LEARN = 0.02
TREE = (
    "root:8 0:8 1:4 2:3 3:2 4:1 5:1 6:1 7:1 00:8 01:3 02:2 03:1 04:1 05:1 06:1 07:1 10:2 11:1 20:1 30:1 40:1 50:1 "
    "000:5 001:2 002:1 003:1 004:1 010:1 020:1 100:1 200:1 300:1 0000:3 0001:1 0002:1 0010:1 0100:1 1000:1 00000:2 00010:1"
)
PATHS = paths(TREE)


@dataclass
class BlockTable:
    """next: RANKS ids for every token of the vocabulary, -1 where none is known.  worth: how often each rank was right."""

    next: array[int]
    worth: list[float] = field(default_factory=lambda: [0.4, 0.15, 0.08, 0.05, 0.04, 0.03, 0.025, 0.02])

    def after(self, token: int) -> array[int]:
        return self.next[token * RANKS : (token + 1) * RANKS]

    def put(self, token: int, ids: list[int]) -> None:
        if len(ids) == RANKS:
            self.next[token * RANKS : (token + 1) * RANKS] = array("i", ids)

    def put_first(self, token: int, said: int) -> None:
        """What was read in a prompt comes before what is known."""
        known = self.after(token).tolist()
        rest = [i for i in known if i != said]
        self.put(token, [said, *rest[: RANKS - 1]])

    def learn(self, rank: int, right: bool) -> None:
        self.worth[rank] += LEARN * (right - self.worth[rank])


class Recycle(Drafter):
    demo: ClassVar = {"token recycling": {}}
    depth = max(map(len, PATHS))
    needs = Needs(topk=RANKS)

    @dataclass(frozen=True)
    class Options:
        """nodes: of a tree at most (None: the published 80, but 8 on a CPU, where every node costs time).  min_token_prob: paths
        less likely are not guessed.
        """

        nodes: int | None = None
        min_token_prob: float = 0.05

        def __post_init__(self) -> None:
            nodes, least = self.nodes, self.min_token_prob
            if nodes is not None and (
                not isinstance(nodes, int) or isinstance(nodes, bool) or not 1 <= nodes <= len(PATHS)
            ):
                raise ConfigError(f"nodes must be a whole number in 1 … {len(PATHS)}, got {nodes!r}.")
            if not isinstance(least, (int, float)) or isinstance(least, bool) or not 0 <= least <= 1:
                raise ConfigError(f"min_token_prob must be a number in [0, 1], got {least!r}.")

    def __init__(self, options: Options, target: Target) -> None:
        super().__init__(options, target)
        self.nodes = options.nodes or (8 if target.decoder.device.type == "cpu" else len(PATHS))
        self.memory = BlockTable(array("i", [-1]) * (target.vocabulary * RANKS))

    @classmethod
    def example(cls, target: Target) -> Drafter:
        """The whole tree, however unlikely its nodes are."""
        return cls(cls.Options(nodes=len(PATHS), min_token_prob=0.0), target)

    def size(self, depth: int) -> int:
        return min(self.nodes, sum(len(path) <= depth for path in PATHS))

    def propose(self, batch: Batch) -> Draft:
        order = self._order() if any(step.budget.nodes for step in batch) else []
        return Draft(
            [
                self._guess(step.row.tokens[-1], order, step.budget) if step.budget.nodes else EMPTY_TREE
                for step in batch
            ]
        )

    def after(self, row: Row, said: Sequence[int], budget: Budget) -> DraftTree:
        return self._guess(said[-1] if said else row.tokens[-1], self._order(), budget)

    def _order(self) -> list[Path]:
        """The nodes that are likely enough, best first: a parent before its children."""
        worth = self.memory.worth
        joint: dict[Path, float] = {(): 1.0}
        for path in PATHS:
            joint[path] = joint[path[:-1]] * worth[path[-1]]
        likely = [path for path in PATHS if joint[path] >= self.options.min_token_prob]
        return sorted(likely, key=lambda path: -joint[path])

    def _guess(self, last: int, order: list[Path], budget: Budget) -> DraftTree:
        table: BlockTable = self.memory
        tree = DraftTree([], [], [])
        place: dict[Path, tuple[int, array[int]]] = {(): (ROOT, table.after(last))}
        for path in order:
            if len(tree.tokens) == min(budget.nodes, self.nodes):
                break
            if len(path) > budget.depth or path[:-1] not in place:
                continue
            parent, following = place[path[:-1]]
            token = following[path[-1]]
            if token >= 0:
                place[path] = len(tree.tokens), table.after(token)
                tree.tokens.append(token)
                tree.parents.append(parent)
                tree.confidence.append(table.worth[path[-1]])
        return tree

    def observe(self, commit: Commit) -> None:
        table = self.memory
        for step in commit.batch:
            if step.tree.tokens:
                self._judge(step.row.tokens[step.end - 1], step.tree, step.accepted)
        for step in commit.batch:
            known = step.row.tokens[step.start : step.end]
            for token, said in itertools.pairwise(known):
                table.put_first(token, said)
            for token, ids in zip([known[-1], *step.tree.tokens], step.topk):
                table.put(token, ids)

    def _judge(self, last: int, tree: DraftTree, accepted: list[int]) -> None:
        """Which ranks were guessed along the path that was taken, and which of them were right."""
        for level, node in enumerate([ROOT, *accepted]):
            following = self.memory.after(last if node == ROOT else tree.tokens[node])
            right = accepted[level] if level < len(accepted) else None
            for child, parent in enumerate(tree.parents):
                if parent == node and tree.tokens[child] in following:
                    self.memory.learn(following.index(tree.tokens[child]), child == right)
