"""Trees that a head grows level by level: EAGLE-2's dynamic one (arXiv 2406.16858), a published static one, and one of drawn guesses.

All of them number the nodes that go through the head, in the order in which they do, and these lie in the slots of this step's guesses.
The row's table begins one slot later than the target's (see recurrent.py), so that node i lies at table[base + i].
"""

from __future__ import annotations

from array import array
from collections.abc import Collection, Sequence
from typing import Protocol, TypeVar

from torch import Tensor

from outrider.backends.candidates import Candidates
from outrider.core.row import Row
from outrider.core.step_input import StepInput
from outrider.core.tree import ROOT, Budget, DraftTree
from outrider.drafting.trees.sampled import Tree
from outrider.drafting.view import View
from outrider.heads.choose import Chooser
from outrider.heads.ranks import Worth
from outrider.heads.templates import Path


class Levelled(Protocol):
    """A tree that grows level by level.  sources: for every row of the next forward, which row of the one before its parent was (of those
    of this tree)."""

    sources: Sequence[int]

    def take(self, choose: Chooser, logits: Tensor) -> None:
        """The next level, from float32 [rows of the last forward, Vd]; `sources` is empty where it was the last."""


T = TypeVar("T", bound=Levelled)


def level_of(trees: Sequence[T], choose: Chooser, logits: Tensor) -> tuple[list[T], list[int]]:
    """Gives every tree its rows of a forward, float32 [rows of all, Vd]: the trees that go on, and for every row of the next forward
    which row of this one its parent was."""
    following, sources, first = list[T](), list[int](), 0
    for tree in trees:
        count = len(tree.sources)
        tree.take(choose, logits[first : first + count])
        if tree.sources:
            sources += [first + source for source in tree.sources]
            following.append(tree)
        first += count
    return following, sources


class Growing(Levelled, Protocol):
    """One whose nodes go through a head with K/V."""

    row: Row
    table: array[int]
    base: int

    @property
    def tips(self) -> list[tuple[list[int], list[int]]]:
        """Of every node that goes through the head next: tokens and slots from the root to it."""

    def add_to(self, step_input: StepInput) -> None: ...
    @property
    def draft_tree(self) -> DraftTree: ...


class Dynamic:
    """Every level asks for the k best behind each of its nodes and goes on with the likeliest of all of them; in the end the
    likeliest nodes of all levels stay.  A node is no likelier than its parent, so that parents stay with their children."""

    def __init__(self, row: Row, table: array[int], base: int, budget: Budget, k: int) -> None:
        self.row, self.table, self.base, self.budget, self.k = row, table, base, budget, min(k, budget.nodes)
        self.wide = max(
            1, min(self.k, budget.nodes // max(1, budget.depth - 1))
        )  # all nodes that go on have a slot of a guess
        self.levels, self.used = 0, 0
        self.candidates: Candidates | None = None
        self.tokens: list[list[int]] = [
            []
        ]  # from the root to each of the nodes that went through the head last
        self.slots: list[list[int]] = [[]]
        self.sources: Sequence[int] = [0]

    def take(self, choose: Chooser, logits: Tensor) -> None:
        if self.candidates is None:
            self.candidates = choose.backend.candidates(self.k, self.wide, self.budget.depth)
        self.sources, said = choose.widen(self.candidates, self.row, self.tokens, logits)
        self.levels += 1
        if self.levels == self.budget.depth:
            self.sources = ()
            return
        first = self.base + self.used
        own = self.table[first : first + len(said)]
        self.used += len(said)
        self.tokens = [[*self.tokens[above], token] for above, token in zip(self.sources, said)]
        self.slots = [[*self.slots[above], slot] for above, slot in zip(self.sources, own)]

    @property
    def tips(self) -> list[tuple[list[int], list[int]]]:
        return list(zip(self.tokens, self.slots))

    def add_to(self, step_input: StepInput) -> None:
        step_input.nodes(self.table, self.base, self.slots, [said[-1] for said in self.tokens])

    @property
    def draft_tree(self) -> DraftTree:
        assert self.candidates is not None
        return DraftTree(*self.candidates.keep(self.budget.nodes))


class Static:
    """A published tree: which ranks behind which get a node is fixed.  Where the budget is smaller, what is likeliest of it stays.

    paths: None for any.  worth: how likely they are, if somebody knows.
    """

    def __init__(
        self,
        row: Row,
        table: array[int],
        base: int,
        budget: Budget,
        paths: Collection[Path] | None,
        worth: Worth | None = None,
    ) -> None:
        self.row, self.table, self.base = row, table, base
        nodes = (worth or Worth.fading(budget.depth, 10)).best(budget.nodes, budget.depth, paths)
        self.children: dict[Path, int] = {}
        for path in nodes:
            self.children[path[:-1]] = self.children.get(path[:-1], 0) + 1
        self.at: dict[Path, tuple[int, list[int], list[int]]] = {
            (): (ROOT, [], [])
        }  # path -> node, and tokens and slots down to it
        self.tokens: list[int] = []
        self.parents: list[int] = []
        self.confidence: list[float] = []
        self.frontier: list[Path] = [()]
        self.sources: Sequence[int] = [0]

    def take(self, choose: Chooser, logits: Tensor) -> None:
        found, likely = choose.best(
            self.row,
            [self.at[path][1] for path in self.frontier],
            logits,
            max(map(self._count, self.frontier)),
        )
        following, sources = list[Path](), list[int]()
        for i, (path, tokens, shares) in enumerate(zip(self.frontier, found.tolist(), likely.tolist())):
            parent, said, slots = self.at[path]
            for rank in range(min(self._count(path), len(tokens))):
                if tokens[rank] < 0:
                    break
                node, below = len(self.tokens), (*path, rank)
                self.at[below] = node, [*said, tokens[rank]], [*slots, self.table[self.base + node]]
                self.tokens.append(tokens[rank])
                self.parents.append(parent)
                self.confidence.append(shares[rank])
                if below in self.children:
                    following.append(below)
                    sources.append(i)
        self.frontier, self.sources = following, sources

    def _count(self, path: Path) -> int:
        return self.children.get(path, 0)

    @property
    def tips(self) -> list[tuple[list[int], list[int]]]:
        return [self.at[path][1:] for path in self.frontier]

    def add_to(self, step_input: StepInput) -> None:
        for said, slots in self.tips:
            step_input.node(self.table, self.base, slots, said[-1])

    @property
    def draft_tree(self) -> DraftTree:
        return DraftTree(self.tokens, self.parents, self.confidence)


class Drawn:
    """For rules that judge guesses by their laws: children are drawn, without replacement, and all that are drawn stay."""

    def __init__(
        self, row: Row, table: array[int], base: int, budget: Budget, k: int, stream_id: int
    ) -> None:
        self.row, self.table, self.base, self.tree = (
            row,
            table,
            base,
            Tree(row, base, budget, k, View(table), stream_id=stream_id),
        )
        self.sources: Sequence[int] = [0]

    def take(self, choose: Chooser, logits: Tensor) -> None:
        tree, above = self.tree, list(self.tree.frontier)
        distributions = {
            node: choose.distribution(self.row, tree.path_tokens(node), logits[i])
            for i, node in enumerate(above)
        }
        tree.draw(
            {node: distribution for node, distribution in distributions.items() if distribution is not None}
        )
        self.sources = [above.index(tree.parents[node]) for node in tree.frontier] if tree.growing else ()

    @property
    def tips(self) -> list[tuple[list[int], list[int]]]:
        tree = self.tree
        return [
            (tree.path_tokens(node), [self.table[self.base + i] for i in tree.paths[node]])
            for node in tree.frontier
        ]

    def add_to(self, step_input: StepInput) -> None:
        self.tree.add_to(step_input)

    @property
    def draft_tree(self) -> DraftTree:
        return self.tree.draft_tree
