"""Hydra and Hydra++ (Ankner et al. 2024, arXiv 2402.05109): heads in sequence, each knowing the drafts
before it.

    position of the target    …  e-2    e-1   │ e      e+1        e = step.end, the token at e-1 is
    pending state of the target          f_e-2        │                   given to `observe`
    token                               x_e-1 │ c_1    c_2
    head 0 reads              P_e-2, x_e-1    │ gives c_1
    head 1 reads              P_e-2, x_e-1,     c_1 │  gives c_2, and so on

P_t is f_t itself (`mlp`), or the output of a Llama block for f_0 … f_t (`prefix-mlp`: Hydra++).  That
block's K/V of position t lies in the target's slot t and depends on nothing after t, so it is shared with
the target's pages.

The shape of the tree is known in advance, so that a level is one pass over all of its nodes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from outrider.cache.catch_up import MAX_PENDING, CatchUp
from outrider.cache.pool import Pool
from outrider.checkpoints.heads import Head
from outrider.core.row import Row
from outrider.core.step import FINAL, Batch, Commit, Needs
from outrider.core.step_input import StepInput
from outrider.core.tree import EMPTY_TREE, Budget, Draft, DraftTree
from outrider.core.validate import check_fields, optional, whole
from outrider.draft.hydra.layouts import check_kind, claims_of, prefixed, translate
from outrider.draft.hydra.network import Network
from outrider.draft.hydra.parts import Prefix, steps
from outrider.drafting.base import Drafter, Storage, Target
from outrider.errors import ConfigError, ModelError, unknown
from outrider.heads.base import HeadOptions, StateDrafter
from outrider.heads.ranks import RankAccuracy
from outrider.heads.reader import Reader
from outrider.heads.templates import MEDUSA, Path, chain_paths, paths
from outrider.heads.trees import RankTree, SampledTree, grow_level

OWN, CHAIN = "own", "chain"
RANKS = 10  # children of a node at most


class Hydra(StateDrafter):
    demo: ClassVar = {
        "Hydra, one head": {"model": "builtin-hydra", "tree": "chain", "num_speculative_tokens": 1}
    }

    @dataclass(frozen=True)
    class Options(HeadOptions):
        """tree: the name of a published one, "chain", or "own": the ranks that were right most often so far.

        nodes: of a tree at most (None: 63, as published; 8 on a CPU, where every node costs time); of a
        published tree the likeliest.  Where the verification rule needs sampled drafts, every level gets
        the same share of the nodes.
        """

        tree: str = OWN
        nodes: int | None = None

        def __post_init__(self) -> None:
            super().__post_init__()
            if self.tree not in (OWN, CHAIN, *MEDUSA):
                raise ConfigError(unknown("tree", self.tree, (OWN, CHAIN, *MEDUSA)))
            check_fields(self, {"nodes": optional(whole(1))})

    def __init__(self, options: Options, target: Target, head: Head | None = None) -> None:
        super().__init__(options, target, head)
        self.head = translate(self.head, target)
        reader = Reader(self.head, self.backend, self.reader.bits)
        embedded = self._embed([0]).shape[1]
        self.steps = steps(reader, embedded, target.vocabulary, target.decoder)
        self.depth = len(self.steps)
        self.tap = self._tap()
        self.needs = Needs(states=(self.tap,))
        self.prefix = Prefix(reader, target) if prefixed(self.head) else None
        self.slot_bytes = self.prefix.slot_bytes if self.prefix else 0
        self.nodes = target.nodes(options.nodes, 63)
        self.paths = self._paths()
        self.memory = RankAccuracy.prior(self.depth, RANKS) if self.paths is None else None
        self.trees: Sequence[DraftTree] = ()  # of this step as proposed; only a part may be verified
        self.catch_up = CatchUp()  # of the prefix layer; `last_states` holds its outputs P [1, hidden]

    @classmethod
    def claims(cls, head: Head) -> int:
        return claims_of(head)

    @classmethod
    def check(cls, head: Head) -> None:
        super().check(head)
        check_kind(head)

    @classmethod
    def example(cls, target: Target) -> Drafter:
        """Random heads over a prefix layer, and a part of the published tree that reaches into the last
        level.
        """
        with torch.random.fork_rng():
            torch.manual_seed(0)
            network = Network.like(target, heads=3, layers=3)
        head = Head.of("example", network.config(), network.state_dict())
        return cls(cls.Options(tree="mc_sim_7b_63", nodes=20), target, head)

    def _tap(self) -> int:
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
        return set(
            chain_paths(self.depth) if self.options.tree == CHAIN else paths(MEDUSA[self.options.tree])
        )

    def allocate(self, slots: int, pool: Pool) -> Storage:
        if self.prefix is None:
            return Storage()
        self.pool = self.prefix.pool(slots)
        return Storage([self.pool])

    def size(self, depth: int) -> int:
        if depth > self.depth:
            raise ConfigError(
                f"num_speculative_tokens {depth} exceeds the {self.depth} heads of {self.head.name!r}: ask "
                f"for {self.depth} at most."
            )
        if self.options.tree == CHAIN:
            return depth
        if self.paths is None:
            possible: int = sum(RANKS**level for level in range(1, depth + 1))
        else:
            possible = sum(len(path) <= depth for path in self.paths)
        return min(self.nodes, possible)

    def propose(self, batch: Batch) -> Draft:
        if self.prefix is not None:
            for step in batch:
                self.catch_up.cursor(step.row, step.start)
            self._catch_up(self.prefix, [step.row for step in batch if self.can_draft(step)])
        rows = self.ready(batch)
        grown = {r: self._tree(batch[r].row, batch[r].end, batch[r].budget) for r in rows}
        if grown:
            embedded = self._embed([batch[r].row.tokens[-1] for r in rows])
            self._grow(torch.cat([self.states(batch, rows), embedded], dim=-1), list(grown.values()))
        self.trees = [grown[r].draft_tree if r in grown else EMPTY_TREE for r in range(len(batch))]
        return Draft(self.trees)

    def _tree(self, row: Row, base: int, budget: Budget) -> RankTree | SampledTree:
        if self.samples(row):
            assert row.table is not None
            siblings = 1 if self.options.tree == CHAIN else max(1, budget.nodes // budget.depth)
            return SampledTree(row, row.table.slots, base, budget, siblings, self.target.stream_id)
        accuracy = self.memory or RankAccuracy.prior(budget.depth, RANKS)
        return RankTree(row, accuracy.best_paths(budget.nodes, budget.depth, self.paths))

    def _grow(self, z: Tensor, trees: Sequence[RankTree | SampledTree]) -> None:
        """Grow all trees, one head a level; z [n, inputs]: the head's input at their frontiers."""
        for step in self.steps:
            trees, sources = grow_level(trees, self.choose, step(z))
            if not trees:
                return
            tokens = [tree.token(node) for tree in trees for node in tree.frontier]
            z = torch.cat([z[sources], self._embed(tokens)], dim=-1)

    def _embed(self, ids: Sequence[int]) -> Tensor:
        return self.target.decoder.embed(ids).to(self.backend.activations)

    def _catch_up(self, prefix: Prefix, rows: Sequence[Row]) -> None:
        """Pass the pending states of these rows through the prefix layer."""
        step_input, states, last = StepInput(), list[Tensor](), list[int]()
        rows = [row for row in rows if self.catch_up.cursors[row].count]
        for row in rows:
            cursor = self.catch_up.cursors[row]
            assert row.table is not None
            step_input.chain(row.table.slots, cursor.first, [0] * cursor.count)
            states += cursor.states
            last.append(step_input.length - 1)
        if not rows:
            return
        outputs = prefix(torch.cat(states).to(self.backend.activations), step_input.build(), self.pool, last)
        for i, row in enumerate(rows):
            cursor = self.catch_up.cursors[row]
            cursor.mark_written()
            cursor.drop_written()
            self.last_states[row] = cursor.end, outputs[i : i + 1]

    def observe(self, commit: Commit) -> None:
        if self.memory is not None:
            for tree, step in zip(self.trees, commit.batch):
                self.memory.update(tree, step.emitted)
        if self.prefix is None:
            super().observe(commit)
            return
        full: list[Row] = []
        for r, step in enumerate(commit.batch):
            cursor = self.catch_up.cursor(step.row, step.start)
            cursor.append(step.start, commit.states.of(r, (self.tap,)))
            if step.row.error is None and (step.known > 1 or cursor.count >= MAX_PENDING):
                full.append(step.row)
        self._catch_up(self.prefix, full)

    def forget(self, row: Row, reason: str) -> None:
        super().forget(row, reason)
        self.catch_up.forget(row)

    def filled(self, row: Row) -> int:
        return self.catch_up.filled(row)
