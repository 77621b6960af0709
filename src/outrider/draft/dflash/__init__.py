"""Block-parallel drafting: one pass of a few layers guesses a whole block (DFlash, arXiv 2602.06036).

A block is the pending token and masks behind it.  Its rows see each other, and of the text before them what the target computed there:
in every layer K and V of position t are projections of g_t = norm(fc(taps of the target at t)).

    position            …  e-2  │ e-1     e      e+1  …       e = step.end, known = 1
    in our pool         …  g_e-2│  ·      ·       ·           at the target's slots, written when t became certain
    one pass takes              │ x_e-1  mask    mask …       K/V of the block is scratch, in the slots of this step's guesses
    its rows say                │  –      e      e+1  …       from_anchor: e, e+1, e+2 …, each row the token after it

DSpark's heads are blocks, too: there, the token before each guess adds a row of a low-rank table to its logits, so that a block is read in
one pass and chosen from left to right.

All that a position needs is the target's states at that position, so whatever the prefix cache gives can be built on.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from outrider.cache.pool import Pool
from outrider.checkpoints.heads import Head
from outrider.core.step_input import StepInput
from outrider.core.types import EMPTY_TREE, Batch, Commit, Draft, DraftTree, Needs, Row
from outrider.draft.dflash import layouts
from outrider.draft.dflash.network import Network
from outrider.draft.dflash.tree import Grower, chain
from outrider.drafting.base import Drafter, Target
from outrider.errors import ConfigError, ModelError
from outrider.heads.base import HeadDrafter, HeadOptions
from outrider.heads.choose import Chooser
from outrider.heads.layer import Block, Sizes, rotary_table
from outrider.heads.ranks import Worth
from outrider.heads.vocabulary import target_ids

RANKS, MOST = 8, 1024


@dataclass
class Keys:
    """What `rope_store` must know of a layer to store K and V alone."""

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
        """nodes: of a tree (None: a chain), by how often which rank of which level was right.  tap_offset: what to add to the file's
        numbers of layers to get the layer that a tapped state enters (None: 1 for dflash_config.target_layer_ids, 0 for
        aux_hidden_state_layer_ids).  With num_speculative_tokens below what the file's block guesses the block is shorter, as in vLLM;
        above it, it is as long as the file's.
        """

        nodes: int | None = None
        tap_offset: int | None = None

        def __post_init__(self) -> None:
            super().__post_init__()
            nodes, offset = self.nodes, self.tap_offset
            if nodes is not None and (
                not isinstance(nodes, int) or isinstance(nodes, bool) or not 1 <= nodes <= MOST
            ):
                raise ConfigError(f"nodes must be a whole number in 1 … {MOST}, got {nodes!r}.")
            if offset is not None and (isinstance(offset, bool) or offset not in (0, 1)):
                raise ConfigError(
                    f"tap_offset must be 0 (the input of a layer) or 1 (its output), got {offset!r}."
                )

    def __init__(self, options: Options, target: Target, head: Head | None = None) -> None:
        super().__init__(options, target, head)
        head = self.head = layouts.translate(self.head)
        self.reader = replace(self.reader, head=head)
        self.layout = layout = layouts.BlockLayout.of(head, target.decoder.spec.layers, options.tap_offset)
        self.depth, self.needs = layout.levels, Needs(states=tuple(sorted(set(layout.taps))))
        if layout.mask >= target.vocabulary:
            raise ModelError(
                f"{head.name!r} does not fit the target: its mask_token_id is {layout.mask}, of {target.vocabulary} tokens."
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
        self.synced: dict[Row, int] = {}  # how many positions of a row have K/V in our pool
        self.gaps: dict[Row, int] = {}  # the first of them whose states nobody saw
        self.trees: Sequence[
            DraftTree
        ] = ()  # of this step, as proposed: what is verified may be a part of them
        if options.nodes is not None:
            self.memory = Worth.fading(layout.levels, RANKS)

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
        self.kv = reader.fused(parts, self.width)  # of all layers at once: they read the same
        return found

    def _outer(self) -> None:
        """Embedding, head and table: the file's own, or None, which means the target's."""
        self.ids = target_ids(self.head, self.target.vocabulary)
        self.choose = Chooser(self.target, self.ids)
        self.embedding, self.lm_head = (
            self._own("embed_tokens", self.width, False),
            self._own("lm_head", self.width, True),
        )
        self.markov: tuple[Any, Any] | None = None
        if "markov_w1.weight" in self.head:
            rank = self.head.shape("markov_w2.weight")[1]
            self.markov = self._own("markov_w1", rank, False), self._own("markov_w2", rank, True)

    def _own(self, name: str, inputs: int, says: bool) -> Any:
        """A row for each of the target's tokens, or for each of those that the head says; padding may follow.  None where it is missing."""
        if f"{name}.weight" not in self.head:
            return None
        stored = self.head.shape(f"{name}.weight")[0]
        rows = len(self.ids) if says and self.ids is not None else max(self.target.vocabulary, stored)
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
        """A random tree of 8, of two layers, one of them with a window; it reads the first and the last states that there are."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            network = Network.like(
                target, taps=(1, target.decoder.spec.layers), block=5, window=9, sliding=(1,), non_causal=True
            )
        return cls(cls.Options(nodes=8), target, Head.of("example", network.config(), network.state_dict()))

    def allocate(self, slots: int, pool: Pool) -> list[Pool]:
        self.pool = self.sizes.pool(len(self.layers), slots, self.target.decoder)
        return [self.pool]

    def size(self, depth: int) -> int:
        depth = min(depth, self.layout.levels)
        if self.options.nodes is None or depth == 0:
            return depth
        most: int = self.options.nodes
        return min(most, RANKS) if depth == 1 else most

    def filled(self, row: Row) -> int:
        done = self.synced.get(row, row.computed)
        return self.gaps.get(row, done)

    def forget(self, row: Row, reason: str) -> None:
        self.synced.pop(row, None)
        self.gaps.pop(row, None)

    def propose(self, batch: Batch) -> Draft:
        rows, trees = [], [EMPTY_TREE] * len(batch)
        for r, step in enumerate(batch):
            # of a row that is new: what the prefix cache gave
            if self.synced.setdefault(step.row, step.start) < step.start:
                self._bridge(step.row, step.start)
            if self.may_guess(step):
                rows.append(r)
        if rows:
            levels = [min(batch[r].budget.depth, self.layout.levels) for r in rows]
            growing = {}
            for r, logits in zip(rows, torch.split(self.look(batch, rows, levels), levels)):
                row = batch[r].row
                paths = (
                    chain(len(logits))
                    if self.memory is None
                    else self.memory.best(batch[r].budget.nodes, len(logits))
                )
                growing[r] = Grower(row, logits, self.choose).grow(
                    paths, self.stream_id if self.draws(row) else None
                )
            for r, tree in self._grown(growing):
                trees[r] = tree
        self.trees = trees
        return Draft(trees)

    def _grown(
        self, growing: dict[int, Generator[list[int], Tensor | None, DraftTree]]
    ) -> Iterator[tuple[int, DraftTree]]:
        """All trees at once, level by level."""
        behind = {r: next(tree) for r, tree in growing.items()}
        while behind:
            added = self._markov([token for tokens in behind.values() for token in tokens])
            parts: Sequence[Tensor | None] = (
                [None] * len(behind)
                if added is None
                else torch.split(added, [len(tokens) for tokens in behind.values()])
            )
            for r, part in zip(list(behind), parts):
                try:
                    behind[r] = growing[r].send(part)
                except StopIteration as end:
                    del behind[r]
                    yield r, end.value

    def _markov(self, tokens: Sequence[int]) -> Tensor | None:
        """float32 [n, Vd]: what each token adds to the logits of what follows it."""
        if self.markov is None:
            return None
        first, second = self.markov
        return self.kernels.linear(self.kernels.embed(first, StepInput.bare(tokens)), second).float()

    def look(self, batch: Batch, rows: Sequence[int], levels: Sequence[int]) -> Tensor:
        """float32 [sum of levels, Vd]: for the next positions of each of these rows, so many."""
        skipped = 0 if self.layout.from_anchor else 1
        plans = {kind: StepInput() for kind in {layer.causal for layer in self.layers}}
        ids: list[int] = []
        wanted: list[int] = []
        for r, deep in zip(rows, levels):
            row, at = batch[r].row, batch[r].start
            assert row.table is not None
            tokens = [row.tokens[at], *[self.layout.mask] * (deep - 1 + skipped)]
            wanted += range(len(ids) + skipped, len(ids) + len(tokens))
            ids += tokens
            for causal, step_input in plans.items():
                if causal:
                    step_input.chain(row.table.slots, at, tokens)
                else:
                    step_input.block(row.table.slots, at, row.table.slots[at : at + len(tokens)], tokens)
        for step_input in plans.values():
            step_input.build()
        x, run = self._embed(ids), self.kernels
        for i, layer in enumerate(self.layers):
            x = layer.block(x, plans[layer.causal], self.pool, i)
        return self._logits(run.rms_norm(x[wanted], self.norm, self.sizes.eps))

    def _embed(self, ids: Sequence[int]) -> Tensor:
        if self.embedding is not None:
            return self.kernels.embed(self.embedding, StepInput.bare(ids))
        return self.target.decoder.embed(ids).to(self.kernels.activations)

    def _logits(self, x: Tensor) -> Tensor:
        if self.lm_head is not None:
            return self.kernels.linear(x, self.lm_head).float()
        logits = self.target.decoder.head_logits(x)
        return logits if self.ids is None else logits[:, self.ids.long().to(logits.device)]

    def observe(self, commit: Commit) -> None:
        step_input, taps, read = StepInput(), list[Tensor](), dict[Row, int]()
        for r, step in enumerate(commit.batch):
            row, start, end = step.row, step.start, step.row.computed
            if self.memory is not None:
                self.memory.learn(self.trees[r], step.emitted)
            if row.error is None and (row.finish_reason is None or step.known > 1):
                assert row.table is not None
                step_input.chain(row.table.slots, start, row.tokens[start:end])
                taps.append(self.aligned(commit, r))
                read[row] = end
        if taps:
            self._remember(torch.cat(taps), step_input.build())
            self.synced.update(read)

    def _bridge(self, row: Row, end: int) -> None:
        """After a step that was interrupted, whose states nobody saw: zeros stand for them, and what follows is not shared."""
        assert row.table is not None
        step_input, start = StepInput(), self.synced[row]
        step_input.chain(row.table.slots, start, row.tokens[start:end])
        self._remember(
            torch.zeros(end - start, len(self.layout.taps) * self.hidden, device=self.kernels.device),
            step_input.build(),
        )
        self.gaps.setdefault(row, start)
        self.synced[row] = end

    def aligned(self, commit: Commit, r: int) -> Tensor:
        """[positions, taps * hidden]: what the target computed at the positions of row r that became certain."""
        return commit.states.of(r, self.layout.taps)

    def _remember(self, taps: Tensor, step_input: StepInput) -> None:
        """K and V of these positions, in every layer."""
        run = self.kernels
        context = run.rms_norm(
            run.linear(taps.to(run.activations), self.fc), self.hidden_norm, self.sizes.eps
        )
        for i, (layer, kv) in enumerate(
            zip(self.layers, run.linear(context, self.kv).chunk(len(self.layers), dim=-1))
        ):
            run.rope_store(kv.contiguous(), layer.keys, layer.block.turn, step_input, self.pool, i)
