"""Hydra and Hydra++ (Ankner et al. 2024, arXiv 2402.05109): heads in sequence, each knowing the drafts
before it.

    position of the target    …  e-2    e-1   │ e      e+1        e = step.end, the token at e-1 is
    pending state of the target          f_e-2        │                   given to `observe`
    token                               x_e-1 │ c_1    c_2
    head 0 reads              P_e-2, x_e-1    │ gives c_1
    head 1 reads              P_e-2, x_e-1,     c_1 │  gives c_2, and so on

P_t is f_t itself (`mlp`), or the output of a Llama block for f_0 … f_t (`prefix-mlp`: Hydra++).  That
block's K/V of position t is in the target's slot t and depends on nothing after t, so it is shared with
the target's pages.

The shape of the tree is known in advance, so that a level is one pass over all of its nodes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import count, takewhile
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from outrider.cache.catch_up import MAX_PENDING
from outrider.checkpoints.heads import Head
from outrider.core.row import Row
from outrider.core.step import FINAL, Batch, Commit, Needs, RowStep
from outrider.core.step_input import StepInput
from outrider.core.tree import Draft
from outrider.draft.hydra.layouts import FORMAT, FROM_TARGET, PREFIX, translate
from outrider.draft.hydra.network import Network
from outrider.drafting.base import Drafter, Target
from outrider.errors import ModelError
from outrider.heads.base import random_head
from outrider.heads.layer import Stack, residual
from outrider.heads.outer import embed, lm_logits
from outrider.heads.ranked import CHAIN, RankedDrafter, RankedOptions
from outrider.heads.reader import Reader
from outrider.heads.trees import RankTree, SampledTree, grow
from outrider.models.fallback.row_invariant import by_rows


class HydraHead:
    """Head i: z = [P_t; e(x_t+1); e(c_1); …; e(c_i)] -> the logits of the next token.

    x = res(z) + silu(linear(z)), then x += silu(linear(x)) for every further block, then the head's own lm
    head, or the target's if the file has none.
    """

    def __init__(self, reader: Reader, target: Target, i: int) -> None:
        head, self.backend, self.model, at = reader.head, reader.backend, target.decoder, f"hydra_mlp.{i}"
        hidden, embedded = self.model.spec.hidden, embed(self.model, [0]).shape[1]
        first = [f"{at}.0.linear", f"{at}.0.res_connection"]
        self.first = reader.biased(first, hidden, hidden + (i + 1) * embedded)
        names = [f"{at}.{j}.linear" for j in takewhile(lambda j: f"{at}.{j}.linear.weight" in head, count(1))]
        for name in names:
            head.shape(f"{name}.bias")
        self.rest = reader.repeated(names, hidden)
        layers = head.config.get("hydra_num_layers")
        if len(self.rest) == 1 and isinstance(layers, int) and layers > 2:  # the file holds it for all
            self.rest *= layers - 1
        own = any(name.startswith("hydra_lm_head.") for name in head)
        self.out = reader.biased([f"hydra_lm_head.{i}"], target.vocabulary, hidden) if own else None

    def __call__(self, z: Tensor) -> Tensor:
        """float32 [n, V]."""
        modified, straight = self.backend.linear(z, self.first).chunk(2, dim=-1)
        x = residual(self.backend, straight + by_rows(F.silu, modified.contiguous()), self.rest)
        return lm_logits(self.model, x, self.out)


class Hydra(RankedDrafter):
    """stack: the prefix layer; None without one.  catch_up: of its K/V; `last_states` holds its outputs P."""

    FORMAT = FORMAT
    demo: ClassVar = {
        "Hydra, one head": {"model": "builtin-hydra", "tree": "chain", "num_speculative_tokens": 1}
    }

    @dataclass(frozen=True)
    class Options(RankedOptions):
        """nodes: None: 63, as published; 8 on a CPU, where every node costs time; of a published tree the
        likeliest.  Where the verification rule needs sampled drafts, every level gets the same share of the
        nodes.
        """

    def __init__(self, options: Options, target: Target, head: Head | None = None) -> None:
        super().__init__(options, target, head)
        self._complete_config()
        names = (name for name in self.head if name.startswith(("hydra_mlp.", "hydra_lm_head.")))
        heads = 1 + max(int(name.split(".")[1]) for name in names)
        self.heads = [HydraHead(self.reader, target, i) for i in range(heads)]
        self.plan(heads, target.vocabulary, learns=options.tree == "own")
        self.tap = self._tap()
        self.needs = Needs(states=(self.tap,))
        self.stack: Stack | None = None
        prefixed = any(name.startswith(PREFIX) for name in self.head)
        if prefixed or self.head.config.get("hydra_head_arch") == "prefix-mlp":
            self.stack = Stack(self.reader, target, [f"{PREFIX}.layers.0"], self.hidden)
            self.norm_out = self.reader.vector(f"{PREFIX}.norm.weight", self.hidden)
            self.pooled = self.stack

    def _complete_config(self) -> None:
        """The prefix layer is a layer of the target, whose config describes it where the head's does not."""
        if "num_attention_heads" not in self.head.config:
            theirs = {name: getattr(self.target.checkpoint.config, name, None) for name in FROM_TARGET}
            config = {name: value for name, value in theirs.items() if value is not None}
            self.head = replace(self.head, config={**config, **self.head.config})
            self.reader = replace(self.reader, head=self.head)

    @classmethod
    def claims(cls, head: Head) -> int:
        return super().claims(head) or int("hydra_head_arch" in head.config)

    @classmethod
    def translate(cls, head: Head) -> Head:
        return translate(head)

    @classmethod
    def example(cls, target: Target) -> Drafter:
        """Random heads over a prefix layer, and a part of the published tree that reaches into the last
        level.
        """
        head = random_head(Network.like, target, heads=3, layers=3)
        return cls(cls.Options(tree="mc_sim_7b_63", nodes=20), target, head)

    def _tap(self) -> int:
        """Which of the target's states the head reads."""
        layers, offset = self.target.decoder.spec.layers, self.head.config.get("hidden_state_offset", 0)
        if not isinstance(offset, int) or not 0 <= offset <= layers:
            raise ModelError(
                f"{self.head.name!r} says hidden_state_offset {offset!r}, and the target has {layers} layers."
            )
        return layers - offset if offset else FINAL

    def propose(self, batch: Batch) -> Draft:
        if self.stack is not None:
            for step in batch:
                self.catch_up.cursor(step.row, step.start)
            self._catch_up(self.stack, [step.row for step in batch if self.can_draft(step)])
        rows = self.ready(batch)
        grown = {r: self._tree(batch[r]) for r in rows}
        if grown:
            tokens = [batch[r].row.tokens[-1] for r in rows]
            self._grow(self._with_tokens(self.states(batch, rows), tokens), list(grown.values()))
        return self.propose_for(batch, {r: tree.draft_tree for r, tree in grown.items()})

    def _tree(self, step: RowStep) -> RankTree | SampledTree:
        row, budget = step.row, step.budget.within(depth=self.levels)
        if self.samples(row):
            assert row.table is not None
            siblings = 1 if self.options.tree == CHAIN else max(1, budget.nodes // budget.depth)
            return SampledTree(row, row.table.slots, step.end, budget, siblings, self.target.stream_id)
        return RankTree(row, self.shape(budget))

    def _grow(self, z: Tensor, trees: Sequence[RankTree | SampledTree]) -> None:
        """Grow all trees, one head a level; z [n, inputs]: the head's input at their frontiers."""

        def deepen(level: int, trees: Sequence[RankTree | SampledTree], sources: list[int]) -> Tensor:
            nonlocal z
            z = self._with_tokens(z[sources], [token for tree in trees for token in tree.frontier_tokens])
            return self.heads[level](z)

        grow(trees, self.choose, self.heads[0](z), deepen)

    def _with_tokens(self, z: Tensor, tokens: Sequence[int]) -> Tensor:
        return torch.cat([z, embed(self.target.decoder, tokens)], dim=-1)

    def _catch_up(self, stack: Stack, rows: Sequence[Row]) -> None:
        """Pass the pending states of these rows through the prefix layer."""
        step_input, states, last = StepInput(), list[Tensor](), list[int]()
        pending = [(row, cursor) for row in rows if (cursor := self.catch_up.cursors[row]).count]
        for row, cursor in pending:
            assert row.table is not None
            step_input.chain(row.table.slots, cursor.first, [0] * cursor.count)
            states += cursor.states
            last.append(step_input.length - 1)
        if not pending:
            return
        x = stack(torch.cat(states).to(self.backend.activations), step_input.build(), self.pool)
        outputs = self.backend.rms_norm(x[last], self.norm_out, stack.sizes.eps)
        for i, (row, cursor) in enumerate(pending):
            cursor.mark_written()
            cursor.drop_written()
            self.last_states[row] = cursor.end, outputs[i : i + 1]

    def observe(self, commit: Commit) -> None:
        if self.stack is None:
            super().observe(commit)
            return
        self.learn(commit)
        full: list[Row] = []
        for r, step in enumerate(commit.batch):
            cursor = self.catch_up.cursor(step.row, step.start)
            cursor.append(step.start, commit.states.of(r, (self.tap,)))
            if step.row.error is None and (step.known > 1 or cursor.count >= MAX_PENDING):
                full.append(step.row)
        self._catch_up(self.stack, full)
