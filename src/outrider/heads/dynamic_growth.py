"""Dynamic draft trees on a device, which chooses the nodes that are expanded, and those that are kept."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from outrider.backends.candidates import TINY
from outrider.core.device import Numbers
from outrider.core.row import Row
from outrider.core.step_input import StepInput
from outrider.core.tree import ROOT, DraftTree
from outrider.heads.growth import Found, by_row, power_of_two, widened
from outrider.heads.trees import DynamicTree

LOWEST = -math.inf


class _Level(NamedTuple):
    """Candidates of T trees after P nodes of each, [T, P, K]; score -inf for none.

    scores: log of the product of shares along the path.  above: [T, P], number of each node's own record.
    """

    scores: Tensor
    tokens: Tensor
    shares: Tensor
    above: Tensor


class DynamicShape(NamedTuple):
    """width: nodes of a tree in a forward.  nodes: of a tree that are kept.  All are upper bounds."""

    levels: int
    k: int
    width: int
    nodes: int

    def begin(self, numbers: Sequence[Tensor]) -> DynamicLevels:
        return DynamicLevels(self, *numbers)


class DynamicLevels:
    """`Levels` of T dynamic trees.

    limits: [T, 2 + levels]: ranks and nodes of each tree, and its rows in each of the logits
    places: [T, levels, width], the row of the logits after each node; any row for a missing one
    new:    [rows, levels - 1, 2], of each row of a forward: the number of its node among T · width, its slot
    front:  records [T, P] of the nodes of the last forward.  joint: [T, P], their scores
    paths:  int32 [rows of the last forward, level], the slots of their paths
    """

    def __init__(self, shape: DynamicShape, limits: Tensor, places: Tensor, new: Tensor) -> None:
        self.shape, self.limits, self.places, self.new = shape, limits, places, new
        self.levels = list[_Level]()
        self.front = torch.full_like(limits[:, :1], ROOT)
        self.joint = torch.zeros_like(self.front, dtype=torch.float64)
        self.paths = torch.zeros_like(limits[:, :0], dtype=torch.int32)

    def add(self, level: int, tokens: Tensor, shares: Tensor, rows: int) -> Found:
        first, places = sum(one.scores[0].numel() for one in self.levels), self._record(level, tokens, shares)
        last = self.levels[-1]
        best, at = last.scores.flatten(1).sort(dim=-1, descending=True, stable=True)
        self.joint, at = best[:, : self.shape.width], at[:, : self.shape.width]
        self.front = first + at
        nodes, slots = self.new[:rows, level].unbind(-1)
        sources = places.gather(1, at // self.shape.k).flatten().index_select(0, nodes)
        ids = last.tokens.flatten(1).gather(1, at).flatten().index_select(0, nodes).clamp_min(0)
        self.paths = torch.cat([self.paths.index_select(0, sources), slots[:, None].int()], 1)
        return Found(ids, sources, self.paths)

    def end(self, level: int, tokens: Tensor, shares: Tensor) -> Tensor:
        """float64 [T, 3, nodes]: token, parent, confidence of each kept node; token -1 for a missing one."""
        self._record(level, tokens, shares)
        scores = torch.cat([one.scores.flatten(1) for one in self.levels], 1)
        tokens = torch.cat([one.tokens.flatten(1) for one in self.levels], 1)
        shares = torch.cat([one.shares.flatten(1) for one in self.levels], 1)
        above = [one.above[:, :, None].expand_as(one.tokens).flatten(1) for one in self.levels]
        parents, no_record = torch.cat(above, 1), scores.shape[1]

        # The records of the likeliest nodes, [T, most], in their order: parents come first.  A missing node
        # has the number behind the last record.
        best, kept = scores.sort(dim=-1, descending=True, stable=True)
        best, kept = best[:, : self.shape.nodes], kept[:, : self.shape.nodes]
        ranks = torch.arange(best.shape[1], device=best.device).expand(len(best), -1)
        too_many = ranks >= self.limits[:, 1:2]
        kept = kept.masked_fill((best == LOWEST) | too_many, no_record).sort(-1).values

        # A node's number is the place of its record among those.
        numbers = torch.full_like(scores[:, :1], ROOT, dtype=torch.int64).repeat(1, no_record + 1)
        numbers.scatter_(1, kept, ranks)
        missing, kept = kept == no_record, kept.clamp_max(no_record - 1)
        tokens, shares, parents = (part.gather(1, kept) for part in (tokens, shares, parents))
        tokens = tokens.masked_fill(missing, -1)
        parents = numbers.gather(1, parents.clamp_min(0)).masked_fill(parents < 0, ROOT)
        return torch.stack([tokens.double(), parents.double(), shares.double()], 1)

    def _record(self, level: int, tokens: Tensor, shares: Tensor) -> Tensor:
        """Add the candidates of a level.  Returns the row of the logits after each node, [T, P]."""
        tokens, shares = widened(tokens, shares, self.shape.k)
        places = self.places[:, level, : self.front.shape[1]]
        tokens, shares = tokens[places], shares[places]
        scores = shares.double().clamp_min(TINY).log() + self.joint[:, :, None]
        _, nodes, ranks = scores.shape
        no_node = torch.arange(nodes, device=scores.device) >= self.limits[:, 2 + level, None]
        no_rank = torch.arange(ranks, device=scores.device) >= self.limits[:, :1]
        scores.masked_fill_((tokens < 0) | no_node[:, :, None] | no_rank[:, None], LOWEST)
        self.levels.append(_Level(scores, tokens, shares, self.front))
        return places


class DynamicGrowth:
    """`DeviceGrowth` of dynamic trees."""

    def __init__(self, trees: Sequence[DynamicTree]) -> None:
        self.trees, levels = trees, max(tree.budget.depth for tree in trees)
        k, width, nodes = (
            power_of_two(max(sizes))
            for sizes in zip(*((tree.k, tree.width, tree.budget.nodes) for tree in trees))
        )
        self.shape = DynamicShape(levels, k, width, nodes)
        self.steps, self.rows = list[StepInput](), [[tree.row for tree in trees]]
        self.counts, self.places = [[1] for _ in trees], [[t] * width for t in range(len(trees))]
        new = [self._lay_out(level) for level in range(1, levels)]
        limits = [n for tree, own in zip(trees, self.counts) for n in (tree.k, tree.budget.nodes, *own)]
        self.numbers = [
            Numbers.of(limits, len(trees), 2 + levels),
            Numbers.of([place for own in self.places for place in own], len(trees), levels, width),
            by_row(new),
        ]

    def _lay_out(self, level: int) -> list[tuple[int, int]]:
        """Add the forward before the logits of a level.  Returns number and slot of each of its nodes."""
        step_input, width, rows, new = StepInput(), self.shape.width, list[Row](), list[tuple[int, int]]()
        for t, tree in enumerate(self.trees):
            count = tree.width if tree.budget.depth > level else 0
            self.counts[t].append(count)
            self.places[t] += [len(new) + min(i, max(0, count - 1)) if count else 0 for i in range(width)]
            if count:
                first = tree.base + tree.used_slots
                tree.used_slots += count
                slots = tree.table[first : first + count].tolist()
                step_input.nodes(tree.table, tree.base, [[slot] * level for slot in slots], [0] * count)
                new += [(t * width + i, slot) for i, slot in enumerate(slots)]
                rows += [tree.row] * count
        self.steps.append(step_input.build())
        self.rows.append(rows)
        return new

    def read(self, found: Tensor) -> None:
        for tree, columns in zip(self.trees, found.tolist()):
            tree.read = _tree_of(*columns)


def _tree_of(tokens: Sequence[float], parents: Sequence[float], shares: Sequence[float]) -> DraftTree:
    count = sum(token >= 0 for token in tokens)
    return DraftTree([*map(int, tokens[:count])], [*map(int, parents[:count])], [*shares[:count]])
