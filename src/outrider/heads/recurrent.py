"""Base of heads that map (hidden state, next token) pairs to the next hidden state: EAGLE, EAGLE-3, MTP.

    position of the target      … e-3     e-2     e-1  │ e       e = step.end, the token at e-1 is pending
    state of the target         f_e-3   f_e-2          │         given to `observe` for every computed token
    token                       x_e-3   x_e-2   x_e-1  │ draft
    pair (f_t, x_t+1) at t         (f_e-3, x_e-2)      │
                                        (f_e-2, x_e-1) │         output o stands for f_e-1, its logits for e
                                              (o, draft)         …

A pair has position t, as in the reference.  Its K/V is in the target's slot t + 1, beside its token, so
that a shared page depends on nothing after it.  The row's table, begun one slot later, has pair t at
index t.

The target's states arrive one step after its tokens.  Each step first catches up: the pairs of all
computed tokens go through the head in one forward, whose last row gives the first level of drafts.  K/V of
draft tokens is scratch.  Chunks of a prompt are read as soon as the target has computed them, so that
samples of one prompt share their K/V.  After a prefix hit the pair at the border needs a state that was
not kept: `Needs.lookbehind` makes the target compute that token again.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import torch
from torch import Tensor

from outrider.backends.launch import RECORDED_ROWS, Call, ForwardShape
from outrider.cache.catch_up import CatchUp, Cursor, DeferredStates, drop_written
from outrider.checkpoints.heads import Head
from outrider.core.device import Numbers, power_of_two, take
from outrider.core.row import Row
from outrider.core.step import Batch, Commit, Needs, RowStep
from outrider.core.step_input import StepInput
from outrider.core.tree import EMPTY_TREE, Budget, Draft
from outrider.core.validate import one_of, whole
from outrider.drafting.base import DEPTHS, Target
from outrider.drafting.options import refuse_idle
from outrider.heads.base import HeadDrafter, LayerOptions
from outrider.heads.choose import Chooser
from outrider.heads.device_trees import on_device
from outrider.heads.growth import DeviceGrowth, GrowthPlan
from outrider.heads.ranks import EAGLE, Path, paths, prior_paths
from outrider.heads.recurrent_net import Net
from outrider.heads.trees import DynamicTree, Growth, LevelTree, RankTree

CHAIN, DYNAMIC = "chain", "dynamic"
TREE = one_of(DYNAMIC, CHAIN, *EAGLE)
CPU_DEPTH = 7  # levels of one node cost little; in a tree of fewer levels forwards have two


@dataclass(frozen=True)
class RecurrentOptions(LayerOptions):
    """tree: "dynamic" (EAGLE-2), "chain", or the name of a published static tree (EAGLE-1).

    top_k: candidates after a node of a dynamic tree, and expanded nodes of a level.  nodes: of a tree
    at most, but never fewer than levels (None: 59, EAGLE-2's total_token of 60 without the root; 7 on a
    CPU, where every node costs time, for published trees too).  A dynamic tree on a CPU has CPU_DEPTH
    levels by default, but no more than nodes.
    """

    tree: Annotated[str, TREE] = DYNAMIC
    top_k: Annotated[int, whole(1, 64)] = 10
    nodes: Annotated[int, whole(1, 1 << 20)] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        refuse_idle(self, self.tree != CHAIN, "a tree", "nodes")
        refuse_idle(self, self.tree == DYNAMIC, 'tree "dynamic"', "top_k")


@dataclass
class Reading:
    """A row whose pending states are read, and its tree.

    table: its slots and those of its draft tokens.  pair_table: the slot of each pair, one slot later
    """

    row: Row
    cursor: Cursor
    table: array[int]
    tree: LevelTree | None = None

    def __post_init__(self) -> None:
        self.pair_table = self.table[1:]


class Forwards:
    """The forwards of one step: the pending pairs of all rows, then the nodes of all trees, by level."""

    def __init__(self, drafter: Recurrent, readings: Sequence[Reading]) -> None:
        self.net, self.pool, self.readings = drafter.net, drafter.pool, readings
        self.choose = drafter.choose
        states = [part for reading in readings for part in reading.cursor.states]
        self.states = torch.cat(states).to(drafter.backend.activations)

    def catch_up(self) -> Tensor:
        """Read all pending pairs.  Returns o [trees, width] of the last pair of every row with a tree."""
        step_input, last_rows = self._pairs()
        return take(self.read_pairs(step_input, self.states), last_rows)

    def grow(self, growth: DeviceGrowth) -> None:
        """Read all pending pairs, and grow the trees, in one launch and one read.

        Pairs beyond those of a usual step are read before, so that few records serve all steps.
        """
        plan, (step_input, ends), states = GrowthPlan.of(growth, self.choose), self._pairs(), self.states
        trees = power_of_two(len(ends))  # for which there is room
        # of each tree: an emitted token, and a chain that was accepted
        usual = max(1, min(1 + plan.shape.levels, RECORDED_ROWS // trees))
        if step_input.length > usual * trees:
            early, late, ends = step_input.split(ends, usual)
            self.read_pairs(step_input.only(early), take(states, early))
            step_input, states = step_input.only(late), take(states, late)
        numbers, layer = [Numbers.of(ends, len(ends)), *plan.numbers], self.net.stack.layers[0]
        shape = ForwardShape([step_input, *growth.forwards], self.pool, layer, usual * trees, trees)
        call = Call(shape, states, numbers, (self.choose, plan.shape))
        growth.set_trees(self.net.backend.launch(self.net.catch_up_and_grow, call))

    def _pairs(self) -> tuple[StepInput, list[int]]:
        """The forward of all pending pairs, and its rows of the last pair of every request with a tree."""
        step_input, last_rows = StepInput(), list[int]()
        for reading in self.readings:
            first, end = reading.cursor.first, reading.cursor.end
            step_input.chain(reading.pair_table, first, reading.row.tokens[first + 1 : end + 1])
            if reading.tree is not None:
                last_rows.append(step_input.length - 1)
        return step_input.build(), last_rows

    def logits(self, level: int, o: Tensor) -> Tensor:
        """float32 [n, Vd] for the drafts of a level, the first of which is 0."""
        return self.net.logits(o)

    def deepen(self, level: int, trees: Sequence[LevelTree], o: Tensor) -> Tensor:
        """o [n, width] of all frontiers, for the drafts of `level`.  o [n, width]: of their parents."""
        step_input = StepInput()
        for tree in trees:
            tree.add_to(step_input)
        return self.follow(step_input.build(), o)

    def follow(self, step_input: StepInput, o: Tensor) -> Tensor:
        """o [n, width] of nodes whose parents' o is given."""
        return self.net.forward(step_input, self.pool, self.net.from_output(o))

    def read_pairs(self, step_input: StepInput, states: Tensor) -> Tensor:
        """o [n, width] of pending pairs, the states of which are given."""
        if not self.on_device:
            return self.net.forward(step_input, self.pool, self.net.from_states(states))
        shape = ForwardShape([step_input], self.pool, self.net.stack.layers[0])
        return self.net.backend.launch(self.net.catch_up, Call(shape, states))[: step_input.length]

    def mark_written(self) -> None:
        for reading in self.readings:
            reading.cursor.mark_written()

    @property
    def on_device(self) -> bool:
        """Whether `Net.catch_up_and_grow` does all of `catch_up` and `deepen`, without a read of tokens."""
        return self.net.stack.divided is None and self.net.model.embedding is not None


class Recurrent(HeadDrafter):
    """Base of drafters with a recurrent head; a subclass makes its network in `network`.

    overlap: last pending states that are read again with the next one.  deferred: those of no cursor yet.
    """

    tunable: ClassVar = {**DEPTHS, "tree": (CHAIN,)}
    depth = 5
    overlap = 0
    net: Net

    def __init__(self, options: Any, target: Target, head: Head | None = None) -> None:
        super().__init__(options, target, head)
        self.net = self.network()
        self.pooled = self.net.stack
        self.needs = Needs(states=self.net.taps, lookbehind=1)
        self.choose = Chooser(target, self.net.ids)
        self.nodes = target.nodes(options.nodes, 59)
        if target.on_cpu and options.tree == DYNAMIC:
            self.depth = min(CPU_DEPTH, self.nodes)
        self.paths: frozenset[Path] = frozenset(paths(EAGLE.get(options.tree, "")))
        self.catch_up = CatchUp(offset=1)
        self.deferred = DeferredStates()

    def network(self) -> Net:
        raise NotImplementedError

    def forwards(self, readings: Sequence[Reading]) -> Forwards:
        return Forwards(self, readings)

    def size(self, depth: int) -> int:
        if self.paths:
            return min(self.nodes, sum(len(path) <= depth for path in self.paths))
        if self.options.tree == CHAIN or self.options.top_k == 1:
            return depth
        k: int = self.options.top_k
        return max(depth, min(self.nodes, k + (depth - 1) * k * k))

    def propose(self, batch: Batch) -> Draft:
        if not sum([step.budget.nodes for step in batch]) and not self._due(batch):
            return Draft([EMPTY_TREE] * len(batch))
        self._append_deferred()
        readings = list[Reading]()
        for step in batch:
            cursor = self.catch_up.cursor(step.row, step.start)
            current = cursor.end == step.start and cursor.count > self.overlap
            drafting = current and self.can_draft(step)
            if drafting or cursor.count >= self.deferred.least_read:
                readings.append(self._reading(step, cursor, drafting))
        trees = {reading.row: reading.tree for reading in readings if reading.tree is not None}
        if readings:
            self._grow(self.forwards(readings), [*trees.values()])
        return Draft([trees[step.row].draft_tree if step.row in trees else EMPTY_TREE for step in batch])

    def _reading(self, step: RowStep, cursor: Cursor, drafting: bool) -> Reading:
        """The pending states of a row, with an empty tree if it is drafted for in this step."""
        row, end, budget = step.row, step.end, step.budget
        reading = Reading(row, cursor, row.slots[: end + budget.nodes])
        if drafting:
            offset = self.catch_up.offset
            table = reading.pair_table if offset else reading.table
            reading.tree = self._tree(row, table, end - offset, budget)
        return reading

    def _tree(self, row: Row, table: array[int], base: int, budget: Budget) -> LevelTree:
        k = 1 if self.options.tree == CHAIN else self.options.top_k
        if self.samples(row):
            return self.sampled_tree(row, table, base, budget, k)
        if not self.paths:
            return DynamicTree(row, table, base, budget, k)
        return RankTree(row, prior_paths(budget.nodes, budget.depth, 10, self.paths), base, table)

    def _grow(self, forwards: Forwards, trees: list[LevelTree]) -> None:
        """Catch up, then grow all trees, one forward a level."""
        if forwards.on_device and (device_growth := on_device(trees, self.choose)) is not None:
            forwards.grow(device_growth)
            forwards.mark_written()
            return
        o, growth = self._catch_up(forwards), Growth(trees, self.choose)
        while trees and growth.add(forwards.logits(growth.level, o)):
            o = forwards.deepen(growth.level, growth.trees, o[growth.sources])

    def _catch_up(self, forwards: Forwards) -> Tensor:
        o = forwards.catch_up()
        forwards.mark_written()
        return o

    def _due(self, batch: Batch) -> bool:
        """Whether states have to be read although nothing is drafted.  Gives new rows their cursors."""
        new = [step for step in batch if step.row not in self.catch_up.cursors]
        if not self.deferred.ended.isdisjoint([step.row for step in new]):
            self._append_deferred()  # of the time before such a row was preempted
        for step in new:
            self.catch_up.cursor(step.row, step.start)
        return self.deferred.due(len(batch), self.overlap + 1)

    def observe(self, commit: Commit) -> None:
        if prompts := [r for r, step in enumerate(commit.batch) if step.known > 1]:
            self._read_prompts(commit.only(prompts, self.net.taps))
            others = [r for r, step in enumerate(commit.batch) if step.known == 1]
            commit = commit.only(others, self.net.taps)
        if commit.batch:
            self.deferred.add(commit)

    def _read_prompts(self, commit: Commit) -> None:
        """Read the chunks of prompts that the rows have computed."""
        readings: list[Reading] = []
        for step, states in zip(commit.batch, commit.states.of_all(self.net.taps)):
            row, cursor = step.row, self.catch_up.cursors[step.row]
            if cursor.end != step.start and self.deferred.num_steps:
                self._append_deferred()  # the chunk before had one token
            cursor.drop_written(self.overlap)
            cursor.append(step.start, states)
            # The last pair is beside the pending token, whose slot may be missing.
            if row.error is None and row.table is not None and row.table.room > row.computed:
                readings.append(Reading(row, cursor, row.slots[: row.computed + 1]))
            else:
                self.deferred.note(cursor)
        if readings:
            self._catch_up(self.forwards(readings))
            # the next first level needs the last pair again
            drop_written([reading.cursor for reading in readings], self.overlap + 1)

    def _append_deferred(self) -> None:
        self.deferred.append_to(self.catch_up, self.net.taps, self.overlap)

    def forget(self, row: Row, reason: str) -> None:
        super().forget(row, reason)
        if not self.catch_up.cursors:
            self.deferred.clear()
        elif self.deferred.num_steps:
            self.deferred.ended.add(row)
