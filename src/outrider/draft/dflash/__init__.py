"""Block-parallel drafting: one pass of a few layers drafts a whole block (DFlash, arXiv 2602.06036).

A block is the pending token followed by masks.  Its rows attend to each other, and to K/V made from the
target's states at all positions before: in every layer, K and V of position t are projections of g_t =
norm(fc(taps of the target at t)).

    position            …  e-2  │ e-1     e      e+1  …       e = step.end, known = 1
    in the pool         …  g_e-2│  ·      ·       ·           at the target's slots, written by `observe`
    input of one pass           │ x_e-1  mask    mask …       its K/V is scratch, in the slots of draft tokens
    its logits are for          │  –      e      e+1  …       from_anchor: e, e+1, e+2 …, the token after each

DSpark heads are blocks, too.  There the token before each draft token adds a row of a low-rank table to
its logits, so a block is one pass, and its tokens are chosen from left to right.

A position needs the target's states at that position only, so any prefix hit can be built on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from outrider.cache.catch_up import CatchUp, Cursor
from outrider.cache.pool import Pool
from outrider.checkpoints.heads import Head
from outrider.core.row import Row
from outrider.core.step import Batch, Commit, Needs
from outrider.core.step_input import StepInput
from outrider.core.tree import EMPTY_TREE, Budget, Draft, DraftTree
from outrider.core.validate import Kind, check_fields, is_whole, optional, whole
from outrider.draft.dflash import layouts
from outrider.draft.dflash.network import Network
from outrider.drafting.base import Drafter, Storage, Target
from outrider.errors import ModelError
from outrider.heads.base import HeadDrafter, HeadOptions
from outrider.heads.choose import Chooser
from outrider.heads.layer import Block, Sizes, rotary_table
from outrider.heads.ranks import RankAccuracy
from outrider.heads.templates import chain_paths
from outrider.heads.trees import BlockTree
from outrider.heads.vocabulary import target_ids

RANKS, MAX_NODES = 8, 1024


@dataclass
class Keys:
    """The arguments of `rope_store` for K and V without Q."""

    kv_heads: int
    head_dim: int
    q_norm: Tensor | None
    k_norm: Tensor | None
    eps: float
    heads: int = 0


@dataclass
class Layer:
    block: Block
    keys: Keys
    causal: bool


class DFlash(HeadDrafter):
    demo: ClassVar = {"DFlash": {"model": "builtin-dflash", "num_speculative_tokens": 2}}

    @dataclass(frozen=True)
    class Options(HeadOptions):
        """nodes: of a tree of the ranks that were right most often (None: a chain).  tap_offset: added to
        the file's layer numbers to get the layer that a tapped state enters (None: 1 for
        dflash_config.target_layer_ids, 0 for aux_hidden_state_layer_ids).  num_speculative_tokens shortens
        the file's block, as in vLLM, and never extends it.
        """

        nodes: int | None = None
        tap_offset: int | None = None

        def __post_init__(self) -> None:
            super().__post_init__()
            side = Kind("0 (the input of a layer) or 1 (its output)", lambda value: is_whole(value, 0, 1))
            check_fields(self, {"nodes": optional(whole(1, MAX_NODES)), "tap_offset": optional(side)})

    def __init__(self, options: Options, target: Target, head: Head | None = None) -> None:
        super().__init__(options, target, head)
        head = self.head = layouts.translate(self.head)
        self.reader = replace(self.reader, head=head)
        self.layout = layout = layouts.BlockLayout.of(head, target.decoder.spec.layers, options.tap_offset)
        self.depth, self.needs = layout.levels, Needs(states=tuple(sorted(set(layout.taps))))
        if layout.mask >= target.vocabulary:
            raise ModelError(
                f"{head.name!r} does not fit the target: its mask_token_id is {layout.mask}, of "
                f"{target.vocabulary} tokens."
            )
        self.width = head.shape("fc.weight")[0]
        if self.width != self.hidden and not ("embed_tokens.weight" in head and "lm_head.weight" in head):
            raise ModelError(
                f"{head.name!r} does not fit the target: it is {self.width} wide, the target {self.hidden}."
            )
        self.fc = self.reader.linear("fc", self.width, len(layout.taps) * self.hidden)
        self.hidden_norm, self.norm = (
            self.reader.vector(f"{name}.weight", self.width) for name in ("hidden_norm", "norm")
        )
        self.sizes = Sizes.of(head, "layers.0", self.width)
        self.layers = self._layers()
        self._outer()
        self.slot_bytes = self.sizes.slot_bytes(len(self.layers), target.decoder)
        self.catch_up = CatchUp()
        self.trees: Sequence[DraftTree] = ()  # of this step as proposed; only a part may be verified
        if options.nodes is not None:
            self.memory = RankAccuracy.prior(layout.levels, RANKS)

    def _layers(self) -> list[Layer]:
        reader, sizes, layout = self.reader, self.sizes, self.layout
        turn = rotary_table(self.head.config, sizes, self.target.max_len + layout.block)
        found = []
        for i, (window, causal) in enumerate(zip(layout.windows, layout.causal)):
            norm = reader.vector(f"layers.{i}.input_layernorm.weight", self.width)
            block = Block(reader, f"layers.{i}", sizes, self.width, turn, window, norm)
            keys = Keys(sizes.kv_heads, sizes.head_dim, block.q_norm, block.k_norm, sizes.eps)
            found.append(Layer(block, keys, causal))
        kv = sizes.kv_heads * sizes.head_dim
        parts = [(f"layers.{i}.self_attn.{name}_proj", kv) for i in range(len(found)) for name in "kv"]
        self.kv = reader.fused(parts, self.width)  # of all layers at once: they have the same input
        return found

    def _outer(self) -> None:
        """Pack the embedding, the lm head and the Markov table of the file; None stands for the target's."""
        self.ids = target_ids(self.head, self.target.vocabulary)
        self.choose = Chooser(self.target, self.ids)
        self.embedding = self._own("embed_tokens", self.width)
        self.lm_head = self._own("lm_head", self.width, output=True)
        self.markov: tuple[Any, Any] | None = None
        if "markov_w1.weight" in self.head:
            rank = self.head.shape("markov_w2.weight")[1]
            self.markov = self._own("markov_w1", rank), self._own("markov_w2", rank, output=True)

    def _own(self, name: str, inputs: int, output: bool = False) -> Any:
        """A table with a row for every token of the target, or of the head's vocabulary if `output`;
        padding may follow. None if the file lacks it."""
        if f"{name}.weight" not in self.head:
            return None
        stored = self.head.shape(f"{name}.weight")[0]
        rows = len(self.ids) if output and self.ids is not None else max(self.target.vocabulary, stored)
        return self.reader.outer.linear(name, rows, inputs)

    @classmethod
    def claims(cls, head: Head) -> int:
        return layouts.claims_of(head)

    @classmethod
    def check(cls, head: Head) -> None:
        super().check(head)
        layouts.translate(head)

    @classmethod
    def example(cls, target: Target) -> Drafter:
        """Two random layers, one with a window, on the first and the last states; a tree of 8."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            network = Network.like(
                target, taps=(1, target.decoder.spec.layers), block=5, window=9, sliding=(1,), non_causal=True
            )
        return cls(cls.Options(nodes=8), target, Head.of("example", network.config(), network.state_dict()))

    def allocate(self, slots: int, pool: Pool) -> Storage:
        self.pool = self.sizes.pool(len(self.layers), slots, self.target.decoder)
        return Storage([self.pool])

    def size(self, depth: int) -> int:
        depth = min(depth, self.layout.levels)
        if self.options.nodes is None or depth == 0:
            return depth
        nodes: int = self.options.nodes
        return min(nodes, RANKS) if depth == 1 else nodes

    def filled(self, row: Row) -> int:
        return self.catch_up.filled(row)

    def forget(self, row: Row, reason: str) -> None:
        self.catch_up.forget(row)

    def propose(self, batch: Batch) -> Draft:
        rows, trees = list[int](), [EMPTY_TREE] * len(batch)
        for r, step in enumerate(batch):
            self.catch_up.cursor(step.row, step.start)
            if self.can_draft(step):
                rows.append(r)
        if rows:
            levels = [min(batch[r].budget.depth, self.layout.levels) for r in rows]
            logits = torch.split(self.block_logits(batch, rows, levels), levels)
            grown = [self._tree(batch[r].row, part, batch[r].budget) for r, part in zip(rows, logits)]
            self._grow(grown)
            for r, tree in zip(rows, grown):
                trees[r] = tree.draft_tree
        self.trees = trees
        return Draft(trees)

    def _tree(self, row: Row, logits: Tensor, budget: Budget) -> BlockTree:
        """The empty tree of a row; logits [levels, Vd]."""
        levels = len(logits)
        shape = chain_paths(levels) if self.memory is None else self.memory.best_paths(budget.nodes, levels)
        return BlockTree(row, logits, shape, self.samples(row), self.target.stream_id)

    def _grow(self, trees: Sequence[BlockTree]) -> None:
        """Grow all trees together, level by level."""
        while trees:
            counts = [len(tree.frontier) for tree in trees]
            biases: Sequence[Tensor | None] = [None] * len(trees)
            if self.markov is not None:
                tokens = [tree.token(node) for tree in trees for node in tree.frontier]
                biases = torch.split(self._markov_bias(tokens, *self.markov), counts)
            for tree, bias in zip(trees, biases):
                tree.add_biased_level(self.choose, bias)
            trees = [tree for tree in trees if tree.frontier]

    def _markov_bias(self, tokens: Sequence[int], embedding: Any, head: Any) -> Tensor:
        """float32 [n, Vd]: what each token adds to the logits of the next."""
        return self.backend.linear(self.backend.embed(embedding, StepInput.of_ids(tokens)), head).float()

    def block_logits(self, batch: Batch, rows: Sequence[int], levels: Sequence[int]) -> Tensor:
        """One pass over the blocks of these rows; float32 [sum of levels, Vd], the next `levels[i]`
        positions of each.
        """
        skipped = 0 if self.layout.from_anchor else 1  # rows of a block without logits
        inputs = {causal: StepInput() for causal in {layer.causal for layer in self.layers}}
        ids: list[int] = []
        kept: list[int] = []
        for r, depth in zip(rows, levels):
            row, start = batch[r].row, batch[r].start
            assert row.table is not None
            slots = row.table.slots
            tokens = [row.tokens[start], *[self.layout.mask] * (depth - 1 + skipped)]
            kept += range(len(ids) + skipped, len(ids) + len(tokens))
            ids += tokens
            for causal, step_input in inputs.items():
                if causal:
                    step_input.chain(slots, start, tokens)
                else:
                    step_input.block(slots, start, slots[start : start + len(tokens)], tokens)
        for step_input in inputs.values():
            step_input.build()
        x = self._embed(ids)
        for i, layer in enumerate(self.layers):
            x = layer.block(x, inputs[layer.causal], self.pool, i)
        return self._logits(self.backend.rms_norm(x[kept], self.norm, self.sizes.eps))

    def _embed(self, ids: Sequence[int]) -> Tensor:
        if self.embedding is not None:
            return self.backend.embed(self.embedding, StepInput.of_ids(ids))
        return self.target.decoder.embed(ids).to(self.backend.activations)

    def _logits(self, x: Tensor) -> Tensor:
        if self.lm_head is not None:
            return self.backend.linear(x, self.lm_head).float()
        logits = self.target.decoder.head_logits(x)
        return logits if self.ids is None else logits[:, self.ids.long().to(logits.device)]

    def observe(self, commit: Commit) -> None:
        step_input, cursors = StepInput(), list[Cursor]()
        for r, step in enumerate(commit.batch):
            row, start = step.row, step.start
            if self.memory is not None:
                self.memory.update(self.trees[r], step.emitted)
            if row.error is None and (row.finish_reason is None or step.known > 1):
                assert row.table is not None
                step_input.chain(row.table.slots, start, row.tokens[start : row.computed])
                cursors.append(cursor := self.catch_up.cursor(row, start))
                cursor.append(start, commit.states.of(r, self.layout.taps))
        if cursors:
            self._store(torch.cat([part for cursor in cursors for part in cursor.states]), step_input.build())
            for cursor in cursors:
                cursor.mark_written()
                cursor.drop_written()

    def _store(self, states: Tensor, step_input: StepInput) -> None:
        """Write K and V of these positions in every layer; states [n, taps * hidden]."""
        run = self.backend
        g = run.linear(states.to(run.activations), self.fc)
        kv = run.linear(run.rms_norm(g, self.hidden_norm, self.sizes.eps), self.kv)
        for i, (layer, part) in enumerate(zip(self.layers, kv.chunk(len(self.layers), dim=-1))):
            run.rope_store(part.contiguous(), layer.keys, layer.block.turn, step_input, self.pool, i)
