"""Hydra and Hydra++ (Ankner et al. 2024, arXiv 2402.05109): heads that guess one after the other, each knowing what was guessed before.

    position of the target    …  e-2    e-1   │ e      e+1        e = step.end, one token pending at e-1
    state of the target          f_e-2        │                   seen by `observe`
    token                               x_e-1 │ c_1    c_2
    head 0 reads              P_e-2, x_e-1    │ says c_1
    head 1 reads              P_e-2, x_e-1,     c_1 │  says c_2, and so on

P_t is f_t itself (`mlp`), or what a Llama block of its own makes of f_0 … f_t (`prefix-mlp`: Hydra++).  That block's K/V of position t
lies in the target's slot t and hangs on nothing after t, so whatever shares the target's pages shares it.

The tree is static: which ranks of which level are worth a node is known before, so that a level is one pass over all of its nodes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from outrider.cache.pool import Pool
from outrider.checkpoints.heads import Head
from outrider.core.step_input import StepInput
from outrider.core.types import EMPTY_TREE, FINAL, Batch, Budget, Commit, Draft, DraftTree, Needs, Row
from outrider.draft.hydra.layouts import check_kind, claims_of, prefixed, translate
from outrider.draft.hydra.network import Network
from outrider.draft.hydra.parts import Prefix, steps
from outrider.drafting.base import Drafter, Target
from outrider.errors import ConfigError, ModelError, unknown
from outrider.heads.base import HeadDrafter, HeadOptions
from outrider.heads.ranks import Worth
from outrider.heads.reader import Reader
from outrider.heads.recurrent import PILE, PendingStates
from outrider.heads.templates import MEDUSA, Path, paths
from outrider.heads.trees import Drawn, Growing, Static, level_of

OWN, CHAIN = "own", "chain"
RANKS = 10  # children of a node at most


class Hydra(HeadDrafter):
    demo: ClassVar = {
        "Hydra, one head": {"model": "builtin-hydra", "tree": "chain", "num_speculative_tokens": 1}
    }

    @dataclass(frozen=True)
    class Options(HeadOptions):
        """tree: a published one by name, "chain", or "own": the ranks that were right most often so far.  nodes: of a tree at most
        (None: 63, as published; 8 on a CPU, where every node costs time); of a published tree the likeliest stay.  Where guesses are drawn
        for the verification rule, every level gets the same share of them.
        """

        tree: str = OWN
        nodes: int | None = None

        def __post_init__(self) -> None:
            super().__post_init__()
            if self.tree not in (OWN, CHAIN, *MEDUSA):
                raise ConfigError(unknown("tree", self.tree, (OWN, CHAIN, *MEDUSA)))
            if self.nodes is not None and (
                not isinstance(self.nodes, int) or isinstance(self.nodes, bool) or self.nodes < 1
            ):
                raise ConfigError(f"nodes must be a whole number of at least 1, got {self.nodes!r}.")

    def __init__(self, options: Options, target: Target, head: Head | None = None) -> None:
        super().__init__(options, target, head)
        self.head = translate(self.head, target)
        reader = Reader(self.head, self.kernels, self.reader.bits)
        embedded = self._embedded([0]).shape[1]
        self.steps = steps(reader, embedded, target.vocabulary, target.decoder)
        self.depth = len(self.steps)
        self.state = self._state()
        self.needs = Needs(states=(self.state,))
        self.prefix = Prefix(reader, target) if prefixed(self.head) else None
        self.slot_bytes = self.prefix.slot_bytes if self.prefix else 0
        self.nodes = options.nodes or (8 if target.decoder.device.type == "cpu" else 63)
        self.paths = self._paths()
        self.memory = Worth.fading(self.depth, RANKS) if self.paths is None else None
        self.trees: Sequence[
            DraftTree
        ] = ()  # of this step, as proposed: what is verified may be a part of them
        self.last: dict[
            Row, tuple[int, Tensor]
        ] = {}  # how many tokens the target had computed, and P [1, hidden] of the last of them
        self.pending_by_row: dict[
            Row, PendingStates
        ] = {}  # states that the prefix layer has not read; it has K/V of all positions before them

    @classmethod
    def claims(cls, head: Head) -> int:
        return claims_of(head)

    @classmethod
    def check(cls, head: Head) -> None:
        super().check(head)
        check_kind(head)

    @classmethod
    def example(cls, target: Target) -> Drafter:
        """Random heads over a prefix layer, and a part of the published tree that reaches into the last level."""
        with torch.random.fork_rng():
            torch.manual_seed(0)  # the same every time
            network = Network.like(target, heads=3, layers=3)
        return cls(
            cls.Options(tree="mc_sim_7b_63", nodes=20),
            target,
            Head.of("example", network.config(), network.state_dict()),
        )

    def _state(self) -> int:
        """Which of the target's states the head reads."""
        layers, offset = self.target.decoder.spec.layers, self.head.config.get("hidden_state_offset", 0)
        if not isinstance(offset, int) or not 0 <= offset <= layers:
            raise ModelError(
                f"{self.head.name!r} says hidden_state_offset {offset!r}, and the target has {layers} layers."
            )
        return layers - offset if offset else FINAL

    def _paths(self) -> set[Path] | None:
        """The nodes that a tree may have; None: any."""
        if self.options.tree == OWN:
            return None
        return (
            {(0,) * (level + 1) for level in range(self.depth)}
            if self.options.tree == CHAIN
            else set(paths(MEDUSA[self.options.tree]))
        )

    def allocate(self, slots: int, pool: Pool) -> list[Pool]:
        if self.prefix is None:
            return []
        self.pool = self.prefix.pool(slots)
        return [self.pool]

    def size(self, depth: int) -> int:
        if depth > self.depth:
            raise ConfigError(
                f"num_speculative_tokens {depth} exceeds the {self.depth} heads of {self.head.name!r}: ask for {self.depth} at most."
            )
        if self.options.tree == CHAIN:
            return depth
        most = (
            sum(RANKS ** (level + 1) for level in range(depth))
            if self.paths is None
            else sum(len(path) <= depth for path in self.paths)
        )
        return min(self.nodes, most)

    def propose(self, batch: Batch) -> Draft:
        wanted = [step for step in batch if self.may_guess(step)]
        if self.prefix is not None:
            for step in batch:
                self.pending_by_row.setdefault(step.row, PendingStates(step.start))
            self._read(self.prefix, [step.row for step in wanted])
        ready = [step for step in wanted if step.row in self.last and self.last[step.row][0] == step.start]
        grown = {step.row: self._growing(step.row, step.end, step.budget) for step in ready}
        if grown:
            before = torch.cat([self.last[step.row][1] for step in ready])
            last = self._embedded([step.row.tokens[-1] for step in ready])
            self._levels(torch.cat([before, last], dim=-1), list(grown.values()))
        self.trees = [grown[row].draft_tree if row in grown else EMPTY_TREE for row in batch.rows]
        return Draft(self.trees)

    def _growing(self, row: Row, base: int, budget: Budget) -> Growing:
        assert row.table is not None
        slots = row.table.slots
        if self.draws(row):
            return Drawn(
                row,
                slots,
                base,
                budget,
                1 if self.options.tree == CHAIN else max(1, budget.nodes // budget.depth),
                self.stream_id,
            )
        return Static(row, slots, base, budget, self.paths, self.memory)

    def _levels(self, z: Tensor, grown: list[Growing]) -> None:
        """Level after level of all trees, one head each, over the nodes that have children; z [n, inputs] of the roots."""
        for step in self.steps:
            grown, sources = level_of(grown, self.choose, step(z))
            if not grown:
                return
            said = [path[-1] for tree in grown for path, _ in tree.tips]
            z = torch.cat([z[sources], self._embedded(said)], dim=-1)

    def _embedded(self, ids: Sequence[int]) -> Tensor:
        return self.target.decoder.embed(ids).to(self.kernels.activations)

    def _read(self, prefix: Prefix, rows: Sequence[Row]) -> None:
        """The states that piled up for these rows, through the prefix layer."""
        step_input, states, ends = StepInput(), list[Tensor](), list[int]()
        rows = [row for row in rows if self.pending_by_row[row].count]
        for row in rows:
            pending_states = self.pending_by_row[row]
            assert row.table is not None
            step_input.chain(row.table.slots, pending_states.first, [0] * pending_states.count)
            states += pending_states.states
            ends.append(step_input.length - 1)
        if rows:
            said = prefix(torch.cat(states).to(self.kernels.activations), step_input.build(), self.pool, ends)
            for i, row in enumerate(rows):
                self.pending_by_row[row].read = len(self.pending_by_row[row].states)
                self.pending_by_row[row].drop()
                self.last[row] = self.pending_by_row[row].first, said[i : i + 1]

    def observe(self, commit: Commit) -> None:
        batch = commit.batch
        if self.memory is not None:
            for tree, step in zip(self.trees, batch):
                self.memory.learn(tree, step.emitted)
        if self.prefix is None:
            for r, step in enumerate(batch):
                if step.emitted:
                    self.last[step.row] = (
                        step.row.computed,
                        commit.states.of(r, (self.state,), last=True).to(self.kernels.activations),
                    )
            return
        for r, step in enumerate(batch):
            pending_states = self.pending_by_row[step.row]
            if (
                pending_states.end == step.start
            ):  # after a step that was interrupted there is a gap, and no more guesses
                pending_states.add(commit.states.of(r, (self.state,)))
        full = [step.row for step in batch if step.known > 1 or self.pending_by_row[step.row].count >= PILE]
        self._read(self.prefix, [row for row in full if row.error is None])

    def forget(self, row: Row, reason: str) -> None:
        self.last.pop(row, None)
        self.pending_by_row.pop(row, None)

    def filled(self, row: Row) -> int:
        return (
            min(row.computed, self.pending_by_row[row].first) if row in self.pending_by_row else row.computed
        )
