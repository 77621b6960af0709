"""Drafters whose head reads a state and the token that was said from it, and says the next state: EAGLE and its kin.

    position of the target      … e-3     e-2     e-1  │ e        e = step.end, one token pending at e-1
    state of the target         f_e-3   f_e-2          │          seen by `observe`, of every token that became certain
    token                       x_e-3   x_e-2   x_e-1  │ guess
    pair (f_t, x_t+1) at t         (f_e-3, x_e-2)      │
                                        (f_e-2, x_e-1) │          says o, which stands for f_e-1, and the guess for e
                                              (o, guess)          …

A pair's position is t, as in the reference.  Its K/V lies in the target's slot t + 1, beside the token that it reads: so a page that
is shared holds nothing that depends on what comes after it.  The row's table, begun one slot later, has pair t at index t.

The target's own states come a step after its tokens.  So every step first catches up: the pairs of all tokens that became certain go
through the head in one forward, whose last row gives the first level; K/V of guesses is scratch in this step's slots.  Chunks of a
prompt are read as soon as the target has computed them, so that samples of one prompt share it.  After a prefix
hit the pair at the border needs a state that nobody kept: `lookbehind` lets the target compute that one token again.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from outrider.cache.pool import Pool
from outrider.checkpoints.heads import Head
from outrider.core.row import Row
from outrider.core.step import Batch, Commit, Needs
from outrider.core.step_input import StepInput
from outrider.core.tree import EMPTY_TREE, Budget, Draft
from outrider.drafting.base import Storage, Target
from outrider.drafting.options import refuse_idle
from outrider.errors import ConfigError, unknown
from outrider.heads.base import HeadDrafter, HeadOptions
from outrider.heads.choose import Chooser
from outrider.heads.templates import EAGLE, Path, paths
from outrider.heads.trees import Drawn, Dynamic, Growing, Static, level_of

PILE = 64  # states of a row that does not guess, before they are read all the same
CHAIN, DYNAMIC = "chain", "dynamic"


class Net(Protocol):
    """The network of a head, packed.  taps: the states of the target that it reads; ids: int32 [Vd], what its tokens are, None if they
    are the target's."""

    taps: tuple[int, ...]
    ids: Tensor | None

    @property
    def slot_bytes(self) -> int: ...
    def pool(self, slots: int) -> Pool: ...
    def enter(self, states: Tensor) -> Tensor:
        """[n, g] of the target's states [n, taps * hidden]: what stands for them in `forward`."""

    def forward(self, step_input: StepInput, pool: Pool, g: Tensor) -> Tensor:
        """[n, o] for the pairs of g [n, g] and the plan's ids; K/V goes to the pool."""

    def again(self, o: Tensor) -> Tensor:
        """[n, g] of o [n, o]: what stands for the next state."""

    def logits(self, o: Tensor) -> Tensor:
        """float32 [n, Vd]."""


@dataclass(frozen=True)
class RecurrentOptions(HeadOptions):
    """tree: "dynamic" (EAGLE-2's), "chain", or a published static tree by name.  top_k: candidates behind a node of a dynamic tree, and how
    many nodes of a level go on.  nodes: of a tree at most, but never fewer than levels (None: 59, EAGLE-2's total_token of 60 without the
    root; 8 on a CPU, where every node costs time, of a published tree, too)."""

    tree: str = DYNAMIC
    top_k: int = 10
    nodes: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.tree not in (DYNAMIC, CHAIN, *EAGLE):
            raise ConfigError(unknown("tree", self.tree, (DYNAMIC, CHAIN, *EAGLE)))
        for name, most in (("top_k", 64), ("nodes", 1 << 20)):
            value = getattr(self, name)
            if value is None and name == "nodes":
                continue
            if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= most:
                raise ConfigError(f"{name} must be a whole number in 1 … {most}, got {value!r}.")
        refuse_idle(self, self.tree != CHAIN, "a tree", "nodes")
        refuse_idle(self, self.tree == DYNAMIC, 'tree "dynamic"', "top_k")


@dataclass
class PendingStates:
    """States of a row that its head has not read: of positions first, first + 1, …"""

    first: int
    states: list[Tensor] = field(default_factory=list)
    count: int = 0
    read: int = 0  # how many entries of `states` went through the head in a step that is not over yet

    @property
    def end(self) -> int:
        return self.first + self.count

    def add(self, states: Tensor) -> None:
        self.states.append(states)
        self.count += len(states)

    def drop(self, keep: int = 0) -> None:
        """What was read, but for the last `keep` states."""
        parts = self.states[: self.read]
        kept = (
            [torch.cat([part[-keep:] for part in parts])[-keep:].clone()] if parts and keep else []
        )  # a view would keep the chunk
        gone = sum(map(len, parts)) - sum(map(len, kept))
        self.first, self.count = self.first + gone, self.count - gone
        self.states[: self.read] = kept
        self.read = 0


@dataclass
class Turn:
    """A row whose pile is read in this step, and the tree that grows behind it, if any.  slots: the row's, and those of its guesses."""

    row: Row
    pending_states: PendingStates
    slots: array[int]
    tree: Growing | None


class Recurrent(HeadDrafter):
    """A subclass makes the network in `network`.  overlap: so many states of a pile are read once more with the next one."""

    depth = 5
    overlap = 0
    net: Net

    def __init__(self, options: Any, target: Target, head: Head | None = None) -> None:
        super().__init__(options, target, head)
        self.net = self.network()
        self.needs = Needs(states=self.net.taps, lookbehind=1)
        self.slot_bytes = self.net.slot_bytes
        self.choose = Chooser(target, self.net.ids)
        self.nodes = options.nodes or (8 if target.decoder.device.type == "cpu" else 59)
        self.paths: set[Path] = set(paths(EAGLE[options.tree])) if options.tree in EAGLE else set()
        self.pending_by_row: dict[Row, PendingStates] = {}
        self.synced: dict[Row, int] = {}  # so many of the row's slots have K/V of the head

    def network(self) -> Net:
        raise NotImplementedError

    def allocate(self, slots: int, pool: Pool) -> Storage:
        self.pool = self.net.pool(slots)
        return Storage([self.pool])

    def size(self, depth: int) -> int:
        if self.paths:
            return min(self.nodes, sum(len(path) <= depth for path in self.paths))
        if self.options.tree == CHAIN or self.options.top_k == 1:
            return depth
        k: int = self.options.top_k
        return max(depth, min(self.nodes, k + (depth - 1) * k * k))

    def propose(self, batch: Batch) -> Draft:
        turns, grown = list[Turn](), dict[int, Growing]()
        for r, step in enumerate(batch):
            row = step.row
            self.synced.setdefault(row, step.start + 1)
            pending_states = self.pending_by_row.get(row)
            if pending_states is None or not pending_states.count:
                continue
            draft_tree = (
                self.may_guess(step)
                and pending_states.end == step.start
                and pending_states.count > self.overlap
            )
            if not (draft_tree or pending_states.count >= PILE):
                continue
            turns.append(turn := self._turn(row, step.end + step.budget.nodes))
            if draft_tree:
                turn.tree = grown[r] = self._growing(row, turn.slots[1:], step.end - 1, step.budget)
        if turns:
            self._levels(self._read(turns), list(grown.values()))
        return Draft([grown[r].draft_tree if r in grown else EMPTY_TREE for r in range(len(batch))])

    def _turn(self, row: Row, end: int) -> Turn:
        """A pile to be read, with slots up to `end`."""
        assert row.table is not None
        return Turn(row, self.pending_by_row[row], row.table.slots[:end], None)

    def _read(self, turns: Sequence[Turn]) -> Tensor:
        """`_catch_up`, and then what it read is known as read."""
        out = self._catch_up(turns)
        for turn in turns:
            row, pending_states = turn.row, turn.pending_states
            pending_states.read = len(pending_states.states)
            if (
                pending_states.first < self.synced[row]
            ):  # otherwise a step that was interrupted left a gap, and what follows it is not shared
                self.synced[row] = pending_states.end + 1
        return out

    def _growing(self, row: Row, table: array[int], base: int, budget: Budget) -> Growing:
        k = 1 if self.options.tree == CHAIN else self.options.top_k
        if self.samples(row):
            return Drawn(
                row, table, base, budget, min(k, max(1, budget.nodes // budget.depth)), self.target.stream_id
            )
        return (
            Static(row, table, base, budget, self.paths)
            if self.paths
            else Dynamic(row, table, base, budget, k)
        )

    def _catch_up(self, turns: Sequence[Turn]) -> Tensor:
        """Reads all piles in one forward: [trees, o] for the last pair of every row that grows a tree."""
        step_input, at = StepInput(), list[int]()
        for turn in turns:
            pending_states = turn.pending_states
            step_input.chain(
                turn.slots[1:],
                pending_states.first,
                turn.row.tokens[pending_states.first + 1 : pending_states.end + 1],
            )
            if turn.tree is not None:
                at.append(step_input.length - 1)
        return self.net.forward(step_input.build(), self.pool, self.net.enter(self._states(turns)))[at]

    def _states(self, turns: Sequence[Turn]) -> Tensor:
        return torch.cat([states for turn in turns for states in turn.pending_states.states]).to(
            self.backend.activations
        )

    def _levels(self, o: Tensor, grown: list[Growing]) -> None:
        """Level after level of all trees, one forward each; o: what the first hang from."""
        level = 0
        while grown:
            grown, sources = level_of(grown, self.choose, self._logits(o, level))
            level += 1
            if grown:
                o = self._deeper(level, grown, o[sources])

    def _logits(self, o: Tensor, level: int) -> Tensor:
        """float32 [n, Vd] for the guesses of one level, the first of which is 0."""
        return self.net.logits(o)

    def _deeper(self, level: int, trees: Sequence[Growing], o: Tensor) -> Tensor:
        """[n, o] of the nodes that the trees go on with, for the guesses of `level`; o: what their parents said."""
        step_input = StepInput()
        for tree in trees:
            tree.add_to(step_input)
        return self.net.forward(step_input.build(), self.pool, self.net.again(o))

    def observe(self, commit: Commit) -> None:
        for r, step in enumerate(commit.batch):
            row, start, states = step.row, step.start, commit.states.of(r, self.net.taps)
            pending_states = self.pending_by_row.setdefault(row, PendingStates(start))
            pending_states.drop(self.overlap)
            if pending_states.end != start:  # a replay, or the first step after a prefix hit
                self.pending_by_row[row] = pending_states = PendingStates(start)
            pending_states.add(states)
        self._read_prompts(commit.batch)

    def _read_prompts(self, batch: Batch) -> None:
        """Chunks are read at once, so that whoever shares the prompt finds its K/V; but for what the first level will be read from."""
        turns = []
        for step in batch:
            row = step.row
            if (
                step.known > 1
                and row.error is None
                and row.table is not None
                and row.table.room > row.computed
            ):
                turns.append(
                    self._turn(row, row.computed + 1)
                )  # the last pair lies beside the pending token, whose slot may be missing
        if turns:
            self._read(turns)
            for turn in turns:
                turn.pending_states.drop(self.overlap + 1)

    def forget(self, row: Row, reason: str) -> None:
        self.pending_by_row.pop(row, None)
        self.synced.pop(row, None)

    def filled(self, row: Row) -> int:
        return min(row.computed, self.synced.get(row, row.computed))


def config_flag(config: Mapping[str, Any], name: str, default: bool) -> bool:
    value = config.get(name)
    return default if value is None else bool(value)
