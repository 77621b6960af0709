"""Dynamic draft trees on a device, which chooses the nodes that are expanded, and those that are kept."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor

from outrider.backends.candidates import TINY
from outrider.core.device import Numbers, power_of_two
from outrider.core.row import Row
from outrider.core.step_input import StepInput
from outrider.core.tree import ROOT, DraftTree
from outrider.heads.growth import LevelInput, pad_ranks, row_table
from outrider.heads.trees import DynamicTree

LOWEST = -math.inf


class _Candidates(NamedTuple):
    """Candidates of one level of T trees: K after each of P parents, [T, P, K].

    A candidate's number counts those of all levels of its tree, level by level.
    scores: log of the product of confidences along the path; -inf for none.  parents: [T, P], numbers of the
    candidates that the parents were
    """

    scores: Tensor
    tokens: Tensor
    confidences: Tensor
    parents: Tensor


class DynamicShape(NamedTuple):
    """Sizes of dynamic trees, upper bounds.  width: nodes of a tree in a forward.  nodes: those kept."""

    levels: int
    k: int
    width: int
    nodes: int

    def begin(self, tables: Sequence[Tensor]) -> DynamicLevels:
        return DynamicLevels(self, *tables)


class DynamicLevels:
    """`Levels` of T dynamic trees.

    limits: int64 [T, 2 + levels]: most candidates after a node, most nodes that are kept, and for each level
            the tree's rows of its logits
    rows:   int64 [T, levels, width], the row of the logits after each node; any row for a missing node
    inputs: int64 [rows, levels - 1, 2], of each row of a forward: its node's number among T · width, its slot

    The nodes of the last forward are `front` [T, P], numbers of the candidates that they were, with the
    scores `front_scores` [T, P].  paths: int32 [rows of the last forward, level], the slots of their paths
    """

    def __init__(self, shape: DynamicShape, limits: Tensor, rows: Tensor, inputs: Tensor) -> None:
        self.shape, self.limits, self.rows, self.inputs = shape, limits, rows, inputs
        self.levels = list[_Candidates]()
        self.front = torch.full_like(limits[:, :1], ROOT)
        self.front_scores = torch.zeros_like(self.front, dtype=torch.float64)
        self.paths = torch.zeros_like(limits[:, :0], dtype=torch.int32)

    def add(self, level: int, tokens: Tensor, confidences: Tensor, num_rows: int) -> LevelInput:
        first = sum(candidates.scores[0].numel() for candidates in self.levels)
        rows = self._add_candidates(level, tokens, confidences)
        candidates, width = self.levels[-1], self.shape.width
        best, order = candidates.scores.flatten(1).sort(dim=-1, descending=True, stable=True)
        self.front_scores, chosen = best[:, :width], order[:, :width]
        self.front = first + chosen

        nodes, slots = self.inputs[:num_rows, level].unbind(-1)
        sources = rows.gather(1, chosen // self.shape.k).flatten().index_select(0, nodes)
        chosen_tokens = candidates.tokens.flatten(1).gather(1, chosen).flatten()
        ids = chosen_tokens.index_select(0, nodes).clamp_min(0)
        self.paths = torch.cat([self.paths.index_select(0, sources), slots[:, None].int()], 1)
        return LevelInput(ids, sources, self.paths)

    def finish(self, level: int, tokens: Tensor, confidences: Tensor) -> Tensor:
        """float64 [T, 3, nodes]: token, parent, confidence of each kept node; token -1 for a missing one."""
        self._add_candidates(level, tokens, confidences)
        scores = torch.cat([own.scores.flatten(1) for own in self.levels], 1)
        tokens = torch.cat([own.tokens.flatten(1) for own in self.levels], 1)
        confidences = torch.cat([own.confidences.flatten(1) for own in self.levels], 1)
        parents = torch.cat(
            [own.parents[:, :, None].expand_as(own.tokens).flatten(1) for own in self.levels], 1
        )

        # Numbers of the likeliest candidates, [T, most], ascending: parents come first.  A missing node has
        # the number after the last candidate.
        no_candidate = scores.shape[1]
        best, kept = scores.sort(dim=-1, descending=True, stable=True)
        best, kept = best[:, : self.shape.nodes], kept[:, : self.shape.nodes]
        places = torch.arange(best.shape[1], device=best.device).expand(len(best), -1)
        beyond_limit = places >= self.limits[:, 1:2]
        kept = kept.masked_fill((best == LOWEST) | beyond_limit, no_candidate).sort(-1).values

        # A node's number is the place of its candidate among those that are kept.
        node_of = torch.full_like(scores[:, :1], ROOT, dtype=torch.int64).repeat(1, no_candidate + 1)
        node_of.scatter_(1, kept, places)
        missing, kept = kept == no_candidate, kept.clamp_max(no_candidate - 1)
        tokens = tokens.gather(1, kept).masked_fill(missing, -1)
        confidences, parents = confidences.gather(1, kept), parents.gather(1, kept)
        parents = node_of.gather(1, parents.clamp_min(0)).masked_fill(parents < 0, ROOT)
        return torch.stack([tokens.double(), parents.double(), confidences.double()], 1)

    def _add_candidates(self, level: int, tokens: Tensor, confidences: Tensor) -> Tensor:
        """Add the candidates of a level.  Returns the row of the logits after each parent, [T, P]."""
        tokens, confidences = pad_ranks(tokens, confidences, self.shape.k)
        rows = self.rows[:, level, : self.front.shape[1]]
        tokens, confidences = tokens[rows], confidences[rows]
        scores = confidences.double().clamp_min(TINY).log() + self.front_scores[:, :, None]
        _, nodes, ranks = scores.shape
        no_node = torch.arange(nodes, device=scores.device) >= self.limits[:, 2 + level, None]
        no_rank = torch.arange(ranks, device=scores.device) >= self.limits[:, :1]
        scores.masked_fill_((tokens < 0) | no_node[:, :, None] | no_rank[:, None], LOWEST)
        self.levels.append(_Candidates(scores, tokens, confidences, self.front))
        return rows


class DynamicGrowth:
    """`DeviceGrowth` of dynamic trees.

    counts: of each tree, its rows of the logits, by level
    rows:   of each tree, the row of the logits after each of `width` nodes, level by level
    """

    def __init__(self, trees: Sequence[DynamicTree]) -> None:
        self.trees = trees
        levels = max(tree.budget.depth for tree in trees)
        k = power_of_two(max(tree.k for tree in trees))
        width = power_of_two(max(tree.width for tree in trees))
        nodes = power_of_two(max(tree.budget.nodes for tree in trees))
        self.shape = DynamicShape(levels, k, width, nodes)
        self.forwards, self.requests = list[StepInput](), [[tree.row for tree in trees]]
        self.counts = [[1] for _ in trees]
        self.rows = [[t] * width for t in range(len(trees))]
        inputs = [self._add_forward(level) for level in range(1, levels)]
        limits = list[int]()
        for tree, counts in zip(trees, self.counts):
            limits += [tree.k, tree.budget.nodes, *counts]
        self.tables = [
            Numbers.of(limits, len(trees), 2 + levels),
            Numbers.of(chain.from_iterable(self.rows), len(trees), levels, width),
            row_table(inputs, len(trees)),
        ]

    def _add_forward(self, level: int) -> list[tuple[int, int]]:
        """Lay out the forward before the logits of a level.  Returns number and slot of each of its nodes."""
        step_input, requests, inputs = StepInput(), list[Row](), list[tuple[int, int]]()
        width = self.shape.width
        for t, tree in enumerate(self.trees):
            if tree.budget.depth <= level:
                self.counts[t].append(0)
                self.rows[t] += [0] * width
                continue
            self.counts[t].append(tree.width)
            first_row, last_row = len(inputs), len(inputs) + tree.width - 1
            self.rows[t] += [min(first_row + i, last_row) for i in range(width)]
            first_slot = tree.base + tree.used_slots
            tree.used_slots += tree.width
            slots = tree.table[first_slot : first_slot + tree.width].tolist()
            step_input.nodes(tree.table, tree.base, [[slot] * level for slot in slots], [0] * tree.width)
            inputs += [(t * width + i, slot) for i, slot in enumerate(slots)]
            requests += [tree.row] * tree.width
        self.forwards.append(step_input.build())
        self.requests.append(requests)
        return inputs

    def set_trees(self, nodes: Tensor) -> None:
        for tree, (tokens, parents, confidences) in zip(self.trees, nodes.tolist()):
            count = sum(token >= 0 for token in tokens)
            tree.device_tree = DraftTree(
                [*map(int, tokens[:count])], [*map(int, parents[:count])], confidences[:count]
            )
