"""Base of block-parallel drafters: one pass of a few layers drafts a whole block (DFlash, arXiv 2602.06036).

A block is the pending token followed by masks.  Its rows attend to each other, and to K/V made from the
target's states at all positions before: in every layer, K and V of position t are projections of g_t =
norm(fc(taps of the target at t)).

    position            …  e-2  │ e-1     e      e+1  …       e = step.end, known = 1
    in the pool         …  g_e-2│  ·      ·       ·           at the target's slots, written by `observe`
    input of one pass           │ x_e-1  mask    mask …       its K/V is scratch, in the slots of draft tokens
    its logits are for          │  –      e      e+1  …       from_anchor: e, e+1, e+2 …, the token after each

In some methods the tokens before each draft token correct its logits (heads/corrections.py).  Then a block
is one pass, and its tokens are chosen from left to right.

A position needs the target's states at that position only, so any prefix hit can be built on.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar

import torch
from torch import Tensor

from outrider.backends.base import LayerKV
from outrider.cache.catch_up import Cursor
from outrider.checkpoints.heads import Head
from outrider.core.row import Row
from outrider.core.step import Batch, Commit, Needs, RowStep
from outrider.core.step_input import StepInput
from outrider.core.tree import Draft
from outrider.core.validate import Kind, is_whole, whole
from outrider.drafting.base import DEPTHS, Target
from outrider.heads.base import HeadDrafter, HeadOptions
from outrider.heads.block_layouts import SIGNS, BlockLayout, from_anchor, kind_of
from outrider.heads.choose import Chooser
from outrider.heads.corrections import CorrectedTree, Correction, grow_corrected
from outrider.heads.device_trees import grow_blocks
from outrider.heads.layer import Stack
from outrider.heads.outer import embed, lm_logits, own_embedding, own_lm_head
from outrider.heads.ranks import Path, RankAccuracy, chain_paths
from outrider.heads.trees import BlockTree, RankTree
from outrider.heads.vocabulary import target_ids

RANKS, MAX_NODES = 8, 1024
SIDE = Kind("0 (the input of a layer) or 1 (its output)", lambda value: is_whole(value, 0, 1))


@dataclass(frozen=True)
class BlockOptions(HeadOptions):
    """nodes: of a tree of the ranks that were right most often (None: a chain).  tap_offset: added to
    the file's layer numbers to get the layer that a tapped state enters (None: 1 for
    dflash_config.target_layer_ids, 0 for aux_hidden_state_layer_ids).  num_speculative_tokens shortens
    the file's block, as in vLLM, and never extends it.
    """

    nodes: Annotated[int, whole(1, MAX_NODES)] | None = None
    tap_offset: Annotated[int, SIDE] | None = None


class BlockDrafter(HeadDrafter):
    """Base of drafters that draft a whole block in one pass.

    correction: of the logits by the tokens before; None for a plain block.
    kind, tensors: what the config calls this method, and an expression found in names of its own tensors.
    signs: our names of tensors that each of its files has.
    """

    kind: ClassVar[str]
    tensors: ClassVar[str]
    signs: ClassVar[Sequence[str]] = SIGNS

    tunable: ClassVar = {**DEPTHS, "nodes": (4, 16)}
    correction: Correction | None = None

    def __init__(self, options: Any, target: Target, head: Head | None = None) -> None:
        super().__init__(options, target, head)
        head, reader = self.head, self.reader
        layers, anchored = target.decoder.spec.layers, self.anchored(head)
        self.layout = layout = BlockLayout.of(head, anchored, layers, options.tap_offset)
        self.depth, self.needs = layout.levels, Needs(states=tuple(sorted(set(layout.taps))))
        self.skipped = 0 if layout.from_anchor else 1  # rows of a block without logits
        if layout.mask >= target.vocabulary:
            raise head.misfit(f"its mask_token_id is {layout.mask}, of {target.vocabulary} tokens")
        self.width = width = self.width_of(head)
        self.embedding = own_embedding(reader, target, width)
        self.hidden_norm = reader.vector("hidden_norm.weight", width)
        self.norm = reader.vector("norm.weight", width)
        names = [f"layers.{i}" for i in range(len(layout.windows))]
        self.stack = Stack(reader, target, names, width, windows=layout.windows, extra_positions=layout.block)
        self.pooled, sizes = self.stack, self.stack.sizes
        self.read_context(names, sizes.kv_heads * sizes.head_dim)
        self.keys = [replace(layer, heads=0) for layer in self.stack.layers]  # for `rope_store`
        self.ids = target_ids(head, target.vocabulary)
        self.choose = Chooser(target, self.ids)
        self.lm_head = own_lm_head(reader, target, width, self.ids)
        if options.nodes is not None:
            self.memory = RankAccuracy.prior(layout.levels, RANKS)

    @staticmethod
    def anchored(head: Head) -> bool:
        """`from_anchor` of such heads."""
        return from_anchor(head)

    @classmethod
    def claims(cls, head: Head) -> int:
        """2: a norm over the taps beside the layers, normed attention heads, and what `is_own` looks for."""
        ours = cls.FORMAT.renamed(head)
        if all(name in ours for name in cls.signs) and "layers.0.hidden_norm.weight" not in ours:
            return 2 if cls.is_own(head) else 0
        return int(cls.FORMAT.named_in(head.config) and cls.is_own(head))

    @classmethod
    def is_own(cls, head: Head) -> bool:
        """Whether a block under its published names is one of this method."""
        return kind_of(head) == cls.kind or any(map(re.compile(cls.tensors).search, head))

    @classmethod
    def width_of(cls, head: Head) -> int:
        """Width of its layers."""
        return head.shape("fc.weight")[0]

    def read_context(self, names: Sequence[str], kv: int) -> None:
        """Pack what makes K and V of the target's states.  names, kv: of the layers, and their width."""
        self.fc = self.reader.linear("fc", self.width, len(self.layout.taps) * self.hidden)
        parts = [(f"{name}.self_attn.{one}_proj", kv) for name in names for one in "kv"]
        self.kv = self.reader.fused(parts, self.width)  # of all layers at once: they have the same input

    def context_kv(self, states: Tensor) -> Iterable[Tensor]:
        """K and V side by side, [n, 2 kv] of each layer, of states [n, taps * hidden]."""
        run = self.backend
        g = run.rms_norm(run.linear(states, self.fc), self.hidden_norm, self.stack.eps)
        return run.linear(g, self.kv).chunk(len(self.keys), dim=-1)

    @property
    def outputs(self) -> int | None:
        """Tokens of a vocabulary of its own; None without one."""
        return None if self.ids is None else len(self.ids)

    def size(self, depth: int) -> int:
        depth = min(depth, self.layout.levels)
        if self.options.nodes is None or depth == 0:
            return depth
        nodes: int = self.options.nodes
        return min(nodes, RANKS) if depth == 1 else nodes

    def propose(self, batch: Batch) -> Draft:
        for step in batch:
            self.catch_up.cursor(step.row, step.start)
        rows = [r for r, step in enumerate(batch) if self.can_draft(step)]
        if not rows:
            return self.propose_for(batch, {})
        levels = [min(batch[r].budget.depth, self.layout.levels) for r in rows]
        logits, states = self.block_logits(batch, rows, levels)
        trees: Sequence[RankTree]
        if self.correction is None:
            trees = plain = list[BlockTree]()
            for r, own_logits in zip(rows, torch.split(logits, levels)):
                plain.append(BlockTree(batch[r].row, own_logits, *self._shape(batch[r], len(own_logits))))
            grow_blocks(plain, self.choose)
        else:
            trees = corrected = list[CorrectedTree]()
            states_of = torch.split(states, [count + self.skipped for count in levels])
            for r, own_logits, own_states in zip(rows, torch.split(logits, levels), states_of):
                shape = self._shape(batch[r], len(own_logits))
                corrected.append(CorrectedTree(batch[r].row, own_logits, own_states, *shape))
            grow_corrected(corrected, self.correction, self.choose)
        return self.propose_for(batch, {r: tree.draft_tree for r, tree in zip(rows, trees)})

    def _shape(self, step: RowStep, depth: int) -> tuple[list[Path], bool, int]:
        """The paths of a row's tree, whether they are sampled, and the number of their random streams."""
        return self._paths(step, depth), self.samples(step.row), self.target.stream_id

    def _paths(self, step: RowStep, depth: int) -> list[Path]:
        """The nodes of a row's tree, as paths of ranks."""
        memory: RankAccuracy | None = self.memory
        return chain_paths(depth) if memory is None else memory.best_paths(step.budget.nodes, depth)

    def block_logits(self, batch: Batch, rows: Sequence[int], levels: Sequence[int]) -> tuple[Tensor, Tensor]:
        """One pass over the blocks of these rows, of the next `levels[i]` positions of each.

        Returns float32 [sum of levels, Vd], and the states after the last norm, [n, width]: of each block's
        positions, after that of its anchor if that predicts nothing.
        """
        layout, skipped, ids = self.layout, self.skipped, list[int]()
        inputs = {causal: StepInput() for causal in set(layout.causal)}  # one for each kind of layer
        predicting: list[int] = []  # rows with logits
        for r, depth in zip(rows, levels):
            row, start = batch[r].row, batch[r].start
            slots = row.slots
            tokens = [row.tokens[start], *[layout.mask] * (depth - 1 + skipped)]
            predicting += range(len(ids) + skipped, len(ids) + len(tokens))
            ids += tokens
            for causal, step_input in inputs.items():
                if causal:
                    step_input.chain(slots, start, tokens)
                else:
                    step_input.block(slots, start, slots[start : start + len(tokens)], tokens)
        for step_input in inputs.values():
            step_input.build()
        x = embed(self.target.decoder, ids, self.embedding)
        x = self.through_layers(x, inputs, [depth + skipped for depth in levels])
        x = self.backend.rms_norm(x, self.norm, self.stack.eps)
        return lm_logits(self.target.decoder, x[predicting], self.lm_head, self.ids), x

    def through_layers(self, x: Tensor, inputs: dict[bool, StepInput], lengths: Sequence[int]) -> Tensor:
        """x [n, width] of some blocks after all layers.  inputs: by whether a layer is causal.  lengths: rows
        of each block."""
        for i, causal in enumerate(self.layout.causal):
            x = self.stack(x, inputs[causal], self.pool, only=i)
        return x

    def observe(self, commit: Commit) -> None:
        self.learn(commit)
        pending: dict[Row, Cursor] = {}
        for r, step in enumerate(commit.batch):
            row = step.row
            if row.error is None and (row.finish_reason is None or step.known > 1):
                pending[row] = self.catch_up.cursor(row, step.start)
                pending[row].append(step.start, commit.states.of(r, self.layout.taps))
        if pending:
            self._store(*self.pending(pending))
        for cursor in pending.values():
            cursor.mark_written()
            cursor.drop_written()

    def _store(self, step_input: StepInput, states: Tensor) -> None:
        """Write K and V of these positions in every layer; states [n, taps * hidden]."""
        run = self.backend
        parts = self.context_kv(states.to(run.activations))
        for i, (keys, part) in enumerate(zip(self.keys, parts)):
            run.rope_store(part.contiguous(), keys, self.stack.rotations, LayerKV(step_input, self.pool, i))
