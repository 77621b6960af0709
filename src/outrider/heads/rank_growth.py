"""Draft trees of given ranks, and chains, on a device: only their tokens are not known in advance."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from outrider.core.row import Row
from outrider.core.step_input import StepInput
from outrider.core.tree import ROOT, DraftTree
from outrider.heads.choose import Chooser
from outrider.heads.growth import Found, by_row, power_of_two, widened
from outrider.heads.trees import DynamicTree, RankTree

NO_LOGITS = torch.empty(0)  # of trees that are laid out


class _RankChooser:
    """`Chooser` that returns ranks in place of tokens, to lay out a tree before there are logits."""

    def __init__(self, vocabulary: int) -> None:
        self.vocabulary = vocabulary

    def ranked(self, row: Row, paths: Sequence[Any], logits: Any, k: int) -> list[list[tuple[int, float]]]:
        return [[(rank, 1.0) for rank in range(min(k, self.vocabulary))] for _ in paths]


class _Laid:
    """A level of trees of ranks, of `rows` parents in all.

    new:     (tree, node), by number, of each new node
    picks:   (row of the logits, rank) of its token
    inputs, sources: of each row of the next forward, the new node and the row of its parent in the last one
    """

    def __init__(self) -> None:
        self.new, self.picks = list[tuple[int, int]](), list[tuple[int, int]]()
        self.inputs, self.sources, self.rows, self.step_input = list[int](), list[int](), 0, StepInput()

    def add(self, i: int, tree: RankTree, ranks: Any) -> bool:
        """Add a level to tree i.  Returns whether it goes on."""
        parents, before = tree.frontier, len(tree.tokens)
        tree.add_level(ranks, NO_LOGITS)
        place = {node: self.rows + at for at, node in enumerate(parents)}
        self.inputs += [len(self.new) + node - before for node in tree.frontier]
        for node in range(before, len(tree.tokens)):
            self.new.append((i, node))
            self.picks.append((place[tree.parents[node]], tree.tokens[node]))
        self.sources += [self.rows + source for source in tree.sources]
        self.rows += len(parents)
        if tree.sources and tree.table:
            tree.add_to(self.step_input)
        return bool(tree.sources)


class RankShape(NamedTuple):
    """Sizes of trees of ranks, or of chains."""

    levels: int
    k: int

    def begin(self, numbers: Sequence[Tensor]) -> RankLevels:
        return RankLevels(self, *numbers)


class RankLevels:
    """`Levels` of trees of ranks.

    picks: [new nodes, levels, 2], row of the logits and rank of each token
    new:   [rows, levels - 1, 2], of each row of a forward, the new node and the row of its parent
    """

    def __init__(self, shape: RankShape, picks: Tensor, new: Tensor) -> None:
        self.shape, self.picks, self.new = shape, picks, new
        self.found = list[Tensor]()

    def add(self, level: int, tokens: Tensor, shares: Tensor, rows: int) -> Found:
        inputs, sources = self.new[:rows, level].unbind(-1)
        return Found(self._picked(level, tokens, shares).index_select(0, inputs).clamp_min(0), sources, None)

    def end(self, level: int, tokens: Tensor, shares: Tensor) -> Tensor:
        """float64 [levels, new nodes, 2]: their tokens, -1 for a missing one, and confidences."""
        self._picked(level, tokens, shares)
        return torch.stack(self.found)

    def _picked(self, level: int, tokens: Tensor, shares: Tensor) -> Tensor:
        """The tokens of the new nodes of a level."""
        at, rank = self.picks[:, level].unbind(-1)
        tokens, shares = widened(tokens, shares, self.shape.k)
        tokens = tokens[at, rank]
        self.found.append(torch.stack([tokens.double(), shares[at, rank].double()], 1))
        return tokens


class RankGrowth:
    """`DeviceGrowth` of trees of ranks, which the host lays out with ranks in place of tokens.

    nodes: of each level, the tree and the number of every new node
    """

    def __init__(self, trees: Sequence[RankTree], choose: Chooser) -> None:
        self.trees, ranks = trees, _RankChooser(choose.vocabulary)
        self.steps, self.rows = list[StepInput](), list[list[Row]]()
        self.nodes, picks, new = list[list[tuple[int, int]]](), list[Any](), list[Any]()
        growing = [*enumerate(trees)]
        while growing:
            self.rows.append([tree.row for _, tree in growing for _ in tree.frontier])
            level = _Laid()
            growing = [(i, tree) for i, tree in growing if level.add(i, tree, ranks)]
            self.nodes.append(level.new)
            picks.append(level.picks)
            if growing:
                self.steps.append(level.step_input.build())
                new.append([*zip(level.inputs, level.sources)])
        k = power_of_two(1 + max((rank for level in picks for _, rank in level), default=0))
        self.shape, self.numbers = RankShape(len(picks), k), [by_row(picks), by_row(new)]

    def read(self, found: Tensor) -> None:
        kept: list[dict[int, tuple[int, float]]] = [{ROOT: (0, 1.0)} for _ in self.trees]
        for nodes, read in zip(self.nodes, found.tolist()):
            for (i, node), (token, share) in zip(nodes, read):
                if token >= 0 and self.trees[i].parents[node] in kept[i]:
                    kept[i][node] = int(token), share
        for tree, own in zip(self.trees, kept):
            tree.read = _filled(tree, own)


def _filled(tree: RankTree, found: dict[int, tuple[int, float]]) -> DraftTree:
    """A tree that was laid out, with the tokens and confidences of those nodes that have a token."""
    kept = sorted(found.keys() - {ROOT})
    only = tree.draft_tree.only(kept)
    return only._replace(tokens=[found[i][0] for i in kept], confidence=[found[i][1] for i in kept])


class ChainGrowth:
    """`DeviceGrowth` of chains.  growing: of each level, the trees that have it, by number."""

    def __init__(self, trees: Sequence[DynamicTree]) -> None:
        self.trees, levels = trees, max(tree.budget.depth for tree in trees)
        everyone = range(len(trees))
        self.growing = [[i for i in everyone if trees[i].budget.depth > level] for level in range(levels)]
        self.rows = [[trees[i].row for i in own] for own in self.growing]
        self.steps, new = list[StepInput](), list[list[tuple[int, int]]]()
        for level in range(1, levels):
            step_input, place = StepInput(), {i: at for at, i in enumerate(self.growing[level - 1])}
            for i in self.growing[level]:
                step_input.chain(trees[i].table, trees[i].base + level - 1, [0])
            self.steps.append(step_input.build())
            new.append([(place[i], place[i]) for i in self.growing[level]])
        picks = [[(at, 0) for at in range(len(own))] for own in self.growing]
        self.shape, self.numbers = RankShape(levels, 1), [by_row(picks), by_row(new)]

    def read(self, found: Tensor) -> None:
        chains: list[list[tuple[int, float]]] = [[] for _ in self.trees]
        for level, (own, read) in enumerate(zip(self.growing, found.tolist())):
            for i, (token, share) in zip(own, read):
                if token >= 0 and len(chains[i]) == level:
                    chains[i].append((int(token), share))
        for tree, chain in zip(self.trees, chains):
            tree.read = DraftTree.chain([token for token, _ in chain], [share for _, share in chain])
