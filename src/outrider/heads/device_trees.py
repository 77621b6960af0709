"""Draft trees of all rows that grow where their logits are: the host reads them once, when they are complete.

How many nodes a level has, their positions and their slots are known before any token.  So the host builds
the forwards of all levels while the device computes, and the numbers that follow from tokens go from one
forward to the next on the device: tokens, and the slots of paths where a token decides about its parent.

    DynamicGrowth  dynamic trees: the device chooses which nodes are expanded, and which are kept
    RankGrowth     trees of given ranks: only tokens are unknown

One pass has the logits of a `BlockTree`; `grow_blocks` reads those of all rows at once.

The trees are those of `heads/trees.py`, level by level.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from outrider.backends.candidates import TINY
from outrider.core.device import take, to_device
from outrider.core.row import Row
from outrider.core.step_input import StepInput
from outrider.core.tree import ROOT, DraftTree
from outrider.heads.choose import Chooser
from outrider.heads.trees import BlockTree, DynamicTree, LevelTree, RankTree

LOWEST = -math.inf
NO_LOGITS = torch.empty(0)  # of trees that are laid out


class DeviceGrowth(Protocol):
    """Trees that grow together.

    level: of the next logits.  sources: int64, for every row of the next forward, the row of its parent in
    the last logits.  k: how many tokens `add` takes for each row of the logits.
    """

    level: int
    sources: Tensor

    @property
    def k(self) -> int: ...

    def begin_level(self) -> list[Row]:
        """The request of each row of the last forward, before `add` is given their next tokens."""

    def add(self, tokens: Tensor, shares: Tensor) -> StepInput | None:
        """Add a level to every tree, from `Chooser.next_tokens` of the last forward's rows.

        Returns the next forward, of the nodes to expand; None once all trees are complete.
        """

    def read(self) -> None:
        """Set `read` of all trees, by one read of the device."""


def on_device(trees: Sequence[LevelTree], choose: Chooser) -> DeviceGrowth | None:
    """What grows these empty trees on the device; None if the host has to see every level."""
    dynamic = [tree for tree in trees if isinstance(tree, DynamicTree)]
    ranked = [
        tree for tree in trees if type(tree) is RankTree and not tree.sampled and tree.acceptance is None
    ]
    rows = [*(tree.row for tree in dynamic), *(tree.row for tree in ranked)]
    if len(trees) not in (len(dynamic), len(ranked)) or not trees or not choose.stays_on_device(rows):
        return None
    return DynamicGrowth(dynamic, choose) if dynamic else RankGrowth(ranked, choose)


class _Level(NamedTuple):
    """Candidates of the first T trees after P nodes of each, [T, P, K]; score -inf for none.

    scores: log of the product of shares along the path.  above: [T, P], number of each node's own record.
    """

    scores: Tensor
    tokens: Tensor
    shares: Tensor
    above: Tensor


class DynamicGrowth:
    """`DeviceGrowth` of dynamic trees, sorted by their depth: those that go on are always the first.

    front: records [T, P] of the nodes of the last forward.  joint: [T, P], their scores.
    paths: int32 [rows of the last forward, level], the slots of their paths.
    rows: the request of each row of the last forward.  counts: nodes of each tree in it.
    records: number of records so far.
    """

    def __init__(self, trees: Sequence[DynamicTree], choose: Chooser) -> None:
        self.device, self.level = choose.backend.device, 0
        order = sorted(range(len(trees)), key=lambda i: -trees[i].budget.depth)
        self.trees = [trees[i] for i in order]
        self.k, self.width = max(tree.k for tree in trees), max(tree.width for tree in trees)
        self.rows = [tree.row for tree in trees]  # the first logits are in the caller's order
        self.counts, self.records = [1] * len(trees), 0
        self.levels: list[_Level] = []
        self.sources = to_device(torch.tensor(order), self.device)
        self.front = torch.full((len(trees), 1), ROOT, device=self.device)
        self.joint = torch.zeros(len(trees), 1, dtype=torch.float64, device=self.device)
        self.paths = torch.zeros(len(trees), 0, dtype=torch.int32, device=self.device)

    def begin_level(self) -> list[Row]:
        return self.rows

    def add(self, tokens: Tensor, shares: Tensor) -> StepInput | None:
        trees = [tree for tree in self.trees if tree.budget.depth > self.level]
        places = self._places()
        tokens, shares = tokens[places], shares[places]
        scores = shares.double().clamp_min(TINY).log() + self.joint[: len(trees), :, None]
        scores.masked_fill_((tokens < 0) | self._beyond(trees, scores), LOWEST)
        self.levels.append(_Level(scores, tokens, shares, self.front[: len(trees)]))
        first, self.records = self.records, self.records + scores[0].numel()
        self.level += 1
        trees = [tree for tree in trees if tree.budget.depth > self.level]
        if not trees:
            return None
        going = len(trees)
        best, at = scores[:going].flatten(1).sort(dim=-1, descending=True, stable=True)
        self.joint, at = best[:, : self.width], at[:, : self.width]
        self.front = first + at
        parents = places[:going].gather(1, at // scores.shape[2])
        return self._forward(trees, tokens[:going].flatten(1).gather(1, at), parents)

    def read(self) -> None:
        scores = self._of_all_levels([level.scores for level in self.levels], LOWEST)
        tokens = self._of_all_levels([level.tokens for level in self.levels], ROOT)
        shares = self._of_all_levels([level.shares for level in self.levels], ROOT)
        above = [level.above[:, :, None].expand_as(level.tokens) for level in self.levels]
        parents = self._of_all_levels(above, ROOT)

        # The records of the likeliest nodes, [trees, most], in their order: parents come first.  A missing
        # node has the number behind the last record.
        budgets = [tree.budget.nodes for tree in self.trees]
        most, no_record = max(budgets), self.records
        best, kept = scores.sort(dim=-1, descending=True, stable=True)
        best, kept = best[:, :most], kept[:, :most]
        ranks = torch.arange(best.shape[1], device=self.device).expand(len(budgets), -1)
        too_many = ranks >= to_device(torch.tensor(budgets), self.device)[:, None]
        kept = kept.masked_fill((best == LOWEST) | too_many, no_record).sort(-1).values

        # A node's number is the place of its record among those.
        numbers = torch.full((len(budgets), no_record + 1), ROOT, device=self.device).scatter_(1, kept, ranks)
        missing, kept = kept == no_record, kept.clamp_max(no_record - 1)
        tokens, shares, parents = (part.gather(1, kept) for part in (tokens, shares, parents))
        tokens = tokens.masked_fill(missing, -1)
        parents = numbers.gather(1, parents.clamp_min(0)).masked_fill(parents < 0, ROOT)
        read = torch.stack([tokens.double(), parents.double(), shares.double()], 1).tolist()
        for tree, columns in zip(self.trees, read):
            tree.read = _tree_of(*columns)

    def _places(self) -> Tensor:
        """The row of the logits after each node of each tree, [T, P]; any row for a missing node."""
        if not self.level:
            return self.sources[:, None]
        rows, first = list[list[int]](), 0
        for count in self.counts:
            rows.append([first + min(i, count - 1) for i in range(self.front.shape[1])])
            first += count
        return to_device(torch.tensor(rows), self.device)

    def _beyond(self, trees: Sequence[DynamicTree], scores: Tensor) -> Tensor:
        """Which of the scores [T, P, K] are not of a node of the last forward, or of a rank too many."""
        _, nodes, ranks = scores.shape
        sizes = torch.tensor([[count, tree.k] for count, tree in zip(self.counts, trees)])
        count, k = to_device(sizes, self.device)[:, :, None].unbind(1)
        beyond = torch.arange(nodes, device=self.device) >= count
        return beyond[:, :, None] | (torch.arange(ranks, device=self.device) >= k)[:, None]

    def _forward(self, trees: Sequence[DynamicTree], tokens: Tensor, parents: Tensor) -> StepInput:
        """The forward of the nodes [T, W] with these tokens, after rows `parents` of the last one."""
        wide = tokens.shape[1]
        self.counts = [min(tree.width, wide) for tree in trees]
        self.rows = [tree.row for tree, count in zip(trees, self.counts) for _ in range(count)]
        real = [t * wide + i for t, count in enumerate(self.counts) for i in range(count)]
        step_input, slots = StepInput(), list[int]()
        for tree, count in zip(trees, self.counts):
            first = tree.base + tree.used_slots
            tree.used_slots += count
            own = tree.table[first : first + count].tolist()
            step_input.nodes(tree.table, tree.base, [[slot] * self.level for slot in own], [0] * count)
            slots += own
        self.sources = take(parents.flatten(), real)
        step_input.device_ids = take(tokens.flatten(), real).clamp_min(0)
        new = to_device(torch.tensor(slots, dtype=torch.int32), self.device)
        self.paths = torch.cat([self.paths.index_select(0, self.sources), new[:, None]], 1)
        step_input.device_paths = self.paths
        return step_input.build()

    def _of_all_levels(self, levels: Sequence[Tensor], blank: float) -> Tensor:
        """[trees, records] of the levels [T, P, K].  Trees that were complete before have `blank`."""
        parts = list[Tensor]()
        for level in levels:
            rest = level.new_full((len(self.trees) - len(level), level[0].numel()), blank)
            parts.append(torch.cat([level.flatten(1), rest]))
        return torch.cat(parts, 1)


def _tree_of(tokens: Sequence[float], parents: Sequence[float], shares: Sequence[float]) -> DraftTree:
    count = sum(token >= 0 for token in tokens)
    return DraftTree([*map(int, tokens[:count])], [*map(int, parents[:count])], [*shares[:count]])


class _RankChooser:
    """Stands in for a `Chooser` while the shape of a tree is laid out: the best token of rank i is i."""

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


class RankGrowth:
    """`DeviceGrowth` of trees of ranks, which the host lays out with ranks in place of tokens.

    levels: tokens and confidences [new nodes, 2] of each, float64, tree after tree.  nodes: of each level,
    the tree and the number of every new node.  laid: the level whose tokens are missing.
    """

    def __init__(self, trees: Sequence[RankTree], choose: Chooser) -> None:
        self.trees, self.growing, self.level = trees, [*enumerate(trees)], 0
        self.ranks: Any = _RankChooser(choose.vocabulary)
        self.sources = torch.empty(0, dtype=torch.int64)
        self.levels, self.nodes = list[Tensor](), list[list[tuple[int, int]]]()
        self.laid = _Laid()

    @property
    def k(self) -> int:
        return 1 + max((rank for _, rank in self.laid.picks), default=0)

    def begin_level(self) -> list[Row]:
        rows = [tree.row for _, tree in self.growing for _ in tree.frontier]
        laid, growing = _Laid(), list[tuple[int, RankTree]]()
        for i, tree in self.growing:
            if laid.add(i, tree, self.ranks):
                growing.append((i, tree))
        self.laid, self.growing = laid, growing
        return rows

    def add(self, tokens: Tensor, shares: Tensor) -> StepInput | None:
        laid, device, missing = self.laid, tokens.device, self.k - tokens.shape[1]
        if missing > 0:  # the head has fewer tokens than ranks
            tokens, shares = F.pad(tokens, (0, missing), value=-1), F.pad(shares, (0, missing))
        at, rank = to_device(torch.tensor(laid.picks, dtype=torch.int64).view(-1, 2).T, device)
        tokens = tokens[at, rank]
        self.levels.append(torch.stack([tokens.double(), shares[at, rank].double()], 1))
        self.nodes.append(laid.new)
        self.level += 1
        if not self.growing:
            return None
        self.sources = to_device(torch.tensor(laid.sources), device)
        laid.step_input.device_ids = take(tokens, laid.inputs).clamp_min(0)
        return laid.step_input.build()

    def read(self) -> None:
        found: list[dict[int, tuple[int, float]]] = [{ROOT: (0, 1.0)} for _ in self.trees]
        read: Iterator[list[float]] = iter(torch.cat(self.levels).tolist())
        for nodes in self.nodes:
            for (i, node), (token, share) in zip(nodes, read):
                if token >= 0 and self.trees[i].parents[node] in found[i]:
                    found[i][node] = int(token), share
        for tree, own in zip(self.trees, found):
            tree.read = _filled(tree, own)


def _filled(tree: RankTree, found: dict[int, tuple[int, float]]) -> DraftTree:
    """A tree that was laid out, with the tokens and confidences of those nodes that have a token."""
    kept = sorted(found.keys() - {ROOT})
    only = tree.draft_tree.only(kept)
    return only._replace(tokens=[found[i][0] for i in kept], confidence=[found[i][1] for i in kept])


def grow_blocks(trees: Sequence[BlockTree], choose: Chooser) -> None:
    """Add all levels to trees of ranks, from their logits; one read for those without logits processors."""
    chosen = [tree for tree in trees if not tree.sampled and tree.children]
    chosen = [tree for tree in chosen if choose.stays_on_device([tree.row])]
    if chosen:
        _rank_levels(chosen, choose)
    for tree in trees:
        tree.grow(choose)


def _rank_levels(trees: Sequence[BlockTree], choose: Chooser) -> None:
    """Set the best tokens of all levels of all trees, by one read of the device."""
    rows, depths = list[Row](), list[int]()  # of all levels
    for tree in trees:
        rows += [tree.row] * len(tree.logits)
        depths += range(len(tree.logits))
    k = max(max(tree.children.values()) for tree in trees)
    tokens, shares = choose.next_tokens(rows, depths, torch.cat([tree.logits for tree in trees]), k)
    levels = iter(torch.stack([tokens.double(), shares.double()], -1).tolist())
    for tree in trees:
        for _ in tree.logits:
            tree.level_rankings.append([(int(token), share) for token, share in next(levels) if token >= 0])
