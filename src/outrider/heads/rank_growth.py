"""Draft trees of given ranks, and chains, on a device: only their tokens are not known in advance."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from outrider.core.device import power_of_two
from outrider.core.row import Row
from outrider.core.step_input import StepInput
from outrider.core.tree import ROOT, DraftTree
from outrider.heads.choose import Chooser
from outrider.heads.growth import LevelInput, pad_ranks, row_table
from outrider.heads.trees import DynamicTree, RankTree

T = TypeVar("T")
NO_LOGITS = torch.empty(0)  # of trees whose shape is laid out before any forward


class RankShape(NamedTuple):
    """Sizes of trees of ranks, or of chains."""

    levels: int
    k: int

    def begin(self, tables: Sequence[Tensor]) -> RankLevels:
        return RankLevels(self, *tables)


class RankLevels:
    """`Levels` of trees of ranks.

    picks:  int64 [new nodes, levels, 2], row of the logits and rank of the token of each new node
    inputs: int64 [rows, levels - 1, 2], new node and row of its parent, of each row of a forward
    nodes:  of each level, float64 [new nodes, 2], tokens and confidences
    """

    def __init__(self, shape: RankShape, picks: Tensor, inputs: Tensor) -> None:
        self.shape, self.picks, self.inputs = shape, picks, inputs
        self.nodes = list[Tensor]()

    def add(self, level: int, tokens: Tensor, confidences: Tensor, num_rows: int) -> LevelInput:
        new_nodes, sources = self.inputs[:num_rows, level].unbind(-1)
        new_tokens = self._add_nodes(level, tokens, confidences)
        return LevelInput(new_tokens.index_select(0, new_nodes).clamp_min(0), sources, None)

    def finish(self, level: int, tokens: Tensor, confidences: Tensor) -> Tensor:
        """float64 [levels, new nodes, 2]: their tokens, -1 for a missing one, and confidences."""
        self._add_nodes(level, tokens, confidences)
        return torch.stack(self.nodes)

    def _add_nodes(self, level: int, tokens: Tensor, confidences: Tensor) -> Tensor:
        """Add the new nodes of a level.  Returns their tokens."""
        rows, ranks = self.picks[:, level].unbind(-1)
        tokens, confidences = pad_ranks(tokens, confidences, self.shape.k)
        tokens, confidences = tokens[rows, ranks], confidences[rows, ranks]
        self.nodes.append(torch.stack([tokens.double(), confidences.double()], 1))
        return tokens


class _RankChooser:
    """`Chooser` that returns ranks in place of tokens, to lay out a tree before there are logits."""

    def __init__(self, vocabulary: int) -> None:
        self.vocabulary = vocabulary

    def ranked(self, row: Row, paths: Sequence[Any], logits: Any, k: int) -> list[list[tuple[int, float]]]:
        return [[(rank, 1.0) for rank in range(min(k, self.vocabulary))] for _ in paths]


class _NewNode(NamedTuple):
    """A node of a level: its tree and itself, by number, and its parent in that tree."""

    tree: int
    node: int
    parent: int


class _LevelLayout:
    """One level of all trees of ranks.

    nodes:      the new ones
    picks:      (row of the logits, rank) of the token of each
    inputs:     (new node, row of its parent in the last logits) of each row of the next forward
    num_rows:   rows of the logits, one for each parent
    step_input: the next forward
    """

    def __init__(self) -> None:
        self.nodes, self.picks = list[_NewNode](), list[tuple[int, int]]()
        self.inputs = list[tuple[int, int]]()
        self.num_rows, self.step_input = 0, StepInput()

    def add(self, i: int, tree: RankTree, chooser: Any) -> None:
        """Add the next level of tree i, whose tokens are ranks."""
        parents, first = tree.frontier, len(tree.tokens)
        tree.add_level(chooser, NO_LOGITS)
        row_of = {parent: self.num_rows + at for at, parent in enumerate(parents)}
        for node, source in zip(tree.frontier, tree.sources):
            self.inputs.append((len(self.nodes) + node - first, self.num_rows + source))
        for node in range(first, len(tree.tokens)):
            parent, rank = tree.parents[node], tree.tokens[node]
            self.nodes.append(_NewNode(i, node, parent))
            self.picks.append((row_of[parent], rank))
        self.num_rows += len(parents)
        if tree.sources and tree.table:
            tree.add_to(self.step_input)


class RankGrowth:
    """`DeviceGrowth` of trees of ranks.  levels: their layouts, from the first."""

    def __init__(self, trees: Sequence[RankTree], choose: Chooser) -> None:
        self.trees, chooser = trees, _RankChooser(choose.vocabulary)
        self.levels, self.requests = list[_LevelLayout](), list[list[Row]]()
        growing: Sequence[int] = range(len(trees))
        while growing:
            self.requests.append([trees[i].row for i in growing for _ in trees[i].frontier])
            level = _LevelLayout()
            for i in growing:
                level.add(i, trees[i], chooser)
            self.levels.append(level)
            growing = [i for i in growing if trees[i].sources]
        before_last = self.levels[:-1]  # those that a forward follows
        self.forwards = [level.step_input.build() for level in before_last]
        last_rank = max((rank for level in self.levels for _, rank in level.picks), default=0)
        self.shape = RankShape(len(self.levels), power_of_two(1 + last_rank))
        picks = [level.picks for level in self.levels]
        self.tables = [row_table(picks), row_table([level.inputs for level in before_last], len(trees))]

    def set_trees(self, nodes: Tensor) -> None:
        found: list[dict[int, tuple[int, float]]] = [{} for _ in self.trees]  # by node, of each tree
        for level, numbers in zip(self.levels, nodes.tolist()):
            for new, (token, confidence) in zip(level.nodes, numbers):
                own = found[new.tree]
                if token >= 0 and (new.parent == ROOT or new.parent in own):
                    own[new.node] = int(token), confidence
        for tree, own in zip(self.trees, found):
            kept = sorted(own)
            tree.device_tree = tree.draft_tree.only(kept)._replace(
                tokens=[own[node][0] for node in kept], confidence=[own[node][1] for node in kept]
            )


class ChainGrowth:
    """`DeviceGrowth` of chains.  growing: by level, the numbers of the chains that have it."""

    def __init__(self, trees: Sequence[DynamicTree]) -> None:
        depths = [tree.budget.depth for tree in trees]
        self.trees, levels = trees, max(depths)
        self.growing = [[i for i, depth in enumerate(depths) if depth > level] for level in range(levels)]
        self.requests = [[trees[i].row for i in growing] for growing in self.growing]
        self.forwards, inputs = list[StepInput](), list[list[tuple[int, int]]]()
        for level in range(1, levels):
            # a chain has one new node and one row of the logits in every level
            row_above = {i: row for row, i in enumerate(self.growing[level - 1])}
            growing, step_input = [trees[i] for i in self.growing[level]], StepInput()
            step_input.tokens([tree.table for tree in growing], [tree.base + level - 1 for tree in growing])
            self.forwards.append(step_input.build())
            inputs.append([(row_above[i], row_above[i]) for i in self.growing[level]])
        picks = [[(row, 0) for row in range(len(growing))] for growing in self.growing]
        self.shape, self.tables = RankShape(levels, 1), [row_table(picks), row_table(inputs, len(trees))]

    def set_trees(self, nodes: Tensor) -> None:
        nodes = nodes.cpu()  # the one read
        tokens = self._of_all(nodes[..., 0].long().tolist(), -1)
        confidences = self._of_all(nodes[..., 1].tolist(), 0.0)
        for tree, own, own_confidences in zip(self.trees, zip(*tokens), zip(*confidences)):
            length = len(own) if min(own) >= 0 else next(i for i, token in enumerate(own) if token < 0)
            tree.device_tree = DraftTree.chain([*own[:length]], [*own_confidences[:length]])

    def _of_all(self, levels: list[list[T]], missing: T) -> list[list[T]]:
        """Each level with an entry for every chain: `missing` for those without it."""
        spread, count = list[list[T]](), len(self.trees)
        for growing, level in zip(self.growing, levels):
            if len(growing) < count:
                own = dict(zip(growing, level))
                level = [own.get(i, missing) for i in range(count)]
            spread.append(level)
        return spread
