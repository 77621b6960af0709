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

Published files.  Ours are the reference's names, with the slots of the file.

    hydra_mlp.{i}.{slot}      block j of head i: slot j, or 2j + 1 with dropouts between them
    hydra_lm_head.{i}.1       hydra_lm_head.{i}, after a dropout
    prefix_embeding_layer     the prefix layer (the misspelling is the file's)
    input_embed_fn            a copy of the target's embedding, not read

The blocks of a head after the first are one module.  Pickles hold it under several names; files without
aliases hold it once, or several times.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from outrider.cache.catch_up import MAX_PENDING
from outrider.checkpoints.heads import Head
from outrider.core.row import Row
from outrider.core.step import FINAL, Batch, Commit, Needs, RowStep
from outrider.core.tree import Draft
from outrider.core.validate import whole
from outrider.drafting.base import Drafter, Target
from outrider.errors import ModelError
from outrider.heads.base import LastState, State, random_head
from outrider.heads.layer import Sizes, Stack, residual
from outrider.heads.layouts import HeadFormat, Layout, numbers, unchanged
from outrider.heads.outer import Ids, embed, lm_logits
from outrider.heads.parts import Layer, ResidualBlock, sizes_config, small_sizes
from outrider.heads.ranked import CHAIN, RankedDrafter, RankedOptions
from outrider.heads.reader import Reader
from outrider.heads.sample import Sample, TargetWeights
from outrider.heads.trees import RankTree, SampledTree
from outrider.models.rowwise import by_rows

PREFIX = "prefix_embeding_layer"
BLOCK, LM_HEAD = "hydra_mlp.{i}.{slot}.{rest}", "hydra_lm_head.{i}.{kind}"


def _refused(head: Head) -> str:
    architecture = head.config.get("hydra_head_arch", "mlp")
    if architecture == "eagle-attn":
        return "its hydra_head_arch is 'eagle-attn', which is an EAGLE head: the method eagle reads it"
    if architecture not in ("mlp", "prefix-mlp"):
        return f"its hydra_head_arch is {architecture!r}, and none of mlp, prefix-mlp and eagle-attn"
    if numbers(head, BLOCK) and not any(".res_connection." in name for name in head):
        return "its heads are not grounded: none reads the draft tokens before its own"
    return ""


ROWS = (
    *unchanged(BLOCK, LM_HEAD, f"{PREFIX}.layers.{{rest}}", f"{PREFIX}.norm.{{rest}}"),
    ("hydra_lm_head.{i}.{slot}.{kind}", LM_HEAD),
)
FORMAT = HeadFormat(
    (Layout("reference", (BLOCK,), ROWS),),
    hidden=(("hydra_mlp.0.{j}.linear.weight", 0),),
    vocabulary=("hydra_lm_head.{i}.weight",),
    numbered=("hydra_mlp.{i}.{rest}", "hydra_lm_head.{i}.{rest}"),
    keys=("hydra_head_arch",),
    known=rf"hydra_.*|{PREFIX}\.(norm|layers\.0)\..*",
    variants=(("", "a prefix of more than one layer"),),
    refused=_refused,
)


class Network(nn.Module):
    """Network for training, with the names and config of the reference's files.

    prefix: sizes of the prefix layer of a `prefix-mlp` head, None for a plain `mlp` head.
    own: every head has an lm_head; otherwise they use the target's.
    """

    def __init__(
        self,
        hidden: int,
        vocabulary: int,
        heads: int = 4,
        layers: int = 4,
        prefix: Sizes | None = None,
        dropout: float = 0.2,
        own: bool = True,
    ) -> None:
        super().__init__()
        self.layers, self.prefix, self.own = layers, prefix, own
        drop = [nn.Dropout(dropout)] if prefix else []  # before every linear of a Hydra++ head
        if prefix:
            parts = {"layers": nn.ModuleList([Layer(prefix)]), "norm": nn.RMSNorm(hidden, prefix.eps)}
            self.prefix_embeding_layer = nn.ModuleDict(parts)
        self.hydra_mlp, self.hydra_lm_head = nn.ModuleList(), nn.ModuleList()
        for i in range(heads):
            first, repeated = ResidualBlock((i + 2) * hidden, hidden), ResidualBlock(hidden, hidden)
            nn.init.zeros_(first.linear.weight)
            nn.init.zeros_(repeated.linear.weight)
            self.hydra_mlp.append(nn.Sequential(*drop, first, *([*drop, repeated] * (layers - 1))))
        if own:
            for _ in range(heads):
                out = nn.Linear(hidden, vocabulary)
                self.hydra_lm_head.append(nn.Sequential(*drop, out) if drop else out)

    @classmethod
    def like(cls, target: Target, arch: str = "prefix-mlp", **options: Any) -> Network:
        """A small one for this target, with random weights."""
        spec = target.decoder.spec
        prefix = small_sizes(spec) if arch == "prefix-mlp" else None
        return cls(spec.hidden, spec.vocabulary, prefix=prefix, **options)

    def start(self, outer: TargetWeights) -> None:
        """The reference's initial weights: every head predicts what the target's lm_head does."""
        for out in self.hydra_lm_head:
            linear: Any = out[-1] if isinstance(out, nn.Sequential) else out
            linear.weight.data.copy_(outer.lm_head)

    def config(self) -> dict[str, Any]:
        """The reference's keys, and the prefix layer's sizes, which the reference takes from the target."""
        return {
            "hydra_head_arch": "prefix-mlp" if self.prefix else "mlp",
            "hydra_num_heads": len(self.hydra_mlp),
            "hydra_num_layers": self.layers,
            "grounded_heads": True,
            "hidden_state_offset": 0,
            **(sizes_config(self.prefix) if self.prefix else {}),
        }

    def prefixed(self, states: Tensor) -> Tensor:
        """P_0 … of f_0 …, [T, hidden] both."""
        if self.prefix is None:
            return states
        parts: Any = self.prefix_embeding_layer
        return parts["norm"](parts["layers"][0].over_texts(states))  # type: ignore[no-any-return]

    def loss(self, sample: Sample, outer: TargetWeights) -> Tensor:
        """Teacher loss: each head's cross entropy with the target's distribution of its predicted token.

        Head 1 reads P_t, e(x_t+1) and e(x_t+2), and predicts x_t+3, taught by logits[t+2].
        """
        embedded, z = outer.embedding[sample.tokens], self.prefixed(sample.states[FINAL])
        total = embedded.new_zeros(())
        for i, mlp in enumerate(self.hydra_mlp):
            z = torch.cat([z[:-1], embedded[i + 1 :]], dim=-1)
            rows = sample.places(i + 1, len(z))
            x = mlp(z.index_select(0, rows))
            logits = self.hydra_lm_head[i](x) if self.own else outer.logits(x)
            if i == 0:
                sample.record(logits, 2 + rows)
            total = total + sample.target_loss(logits, i + 1 + rows)
        return total


class HydraHead:
    """Head i: z = [P_t; e(x_t+1); e(c_1); …; e(c_i)] -> the logits of the next token.

    x = res(z) + silu(linear(z)), then x += silu(linear(x)) for every further block, then the head's own lm
    head, or the target's if the file has none.
    """

    def __init__(self, reader: Reader, target: Target, i: int) -> None:
        head, self.backend, self.model, at = reader.head, reader.backend, target.decoder, f"hydra_mlp.{i}"
        hidden, embedded = self.model.spec.hidden, embed(self.model, [0]).shape[1]
        slots = sorted(numbers(head, f"{at}.{{slot}}.{{rest}}", field="slot")) or [0]
        first = [f"{at}.{slots[0]}.linear", f"{at}.{slots[0]}.res_connection"]
        self.first = reader.linear_with_bias(first, hidden, hidden + (i + 1) * embedded)
        names = [f"{at}.{slot}.linear" for slot in slots[1:]]
        for name in names:
            head.shape(f"{name}.bias")
        self.rest = reader.shared_linears(names, hidden)
        if len(self.rest) == 1:  # for all further layers
            self.rest *= max(1, head.config.get("hydra_num_layers", 2) - 1)
        own = any(name.startswith("hydra_lm_head.") for name in head)
        self.out = reader.linear_with_bias([f"hydra_lm_head.{i}"], target.vocabulary, hidden) if own else None

    def __call__(self, z: Tensor) -> Tensor:
        """float32 [n, V]."""
        modified, straight = self.backend.linear(z, self.first).chunk(2, dim=-1)
        x = residual(self.backend, straight + by_rows(F.silu, modified.contiguous()), self.rest)
        return lm_logits(self.model, x, self.out)


class Hydra(RankedDrafter):
    """Drafter with Hydra heads.

    pooled: the prefix layer, None without one; `last_states` holds its outputs.  catch_up: of its K/V.
    """

    FORMAT = FORMAT
    demo: ClassVar = {"Hydra": {"model": "builtin-hydra", "tree": "chain", "num_speculative_tokens": 2}}

    @dataclass(frozen=True)
    class Options(RankedOptions):
        """nodes: None: 63, as published; 7 on a CPU, where every node costs time; of a published tree the
        likeliest.  Where rules need sampled drafts, every level gets the same share of the nodes.
        """

    def __init__(self, options: Options, target: Target, head: Head | None = None) -> None:
        super().__init__(options, target, head)
        self.complete_config()
        heads = 1 + max(numbers(self.head, *FORMAT.numbered))
        self.heads = [HydraHead(self.reader, target, i) for i in range(heads)]
        self.plan(heads, target.vocabulary, learns=options.tree == "own")
        layers, offset = target.decoder.spec.layers, self.head.config.get("hidden_state_offset", 0)
        whole(0, layers).check(offset, f"hidden_state_offset of {self.head.name!r}", ModelError)
        self.tap = layers - offset if offset else FINAL
        self.needs = Needs(states=(self.tap,))
        announced = self.head.config.get("hydra_head_arch") == "prefix-mlp"
        if announced or any(name.startswith(PREFIX) for name in self.head):
            self.pooled = Stack(self.reader, target, [f"{PREFIX}.layers.0"], self.hidden)
            self.norm_out = self.reader.vector(f"{PREFIX}.norm.weight", self.hidden)

    @classmethod
    def example(cls, target: Target) -> Drafter:
        """Random heads over a prefix layer, and a part of the published tree that has all levels."""
        head = random_head(Network.like, target, heads=3, layers=3)
        return cls(cls.Options(tree="mc_sim_7b_63", nodes=20), target, head)

    def propose(self, batch: Batch) -> Draft:
        if self.pooled is not None:
            for step in batch:
                self.catch_up.cursor(step.row, step.start)
            self._catch_up([step.row for step in batch if self.can_draft(step)])
        return super().propose(batch)

    def tree(self, step: RowStep) -> RankTree | SampledTree:
        row, budget = step.row, step.budget.within(depth=self.levels)
        if self.samples(row):
            k = 1 if self.options.tree == CHAIN else budget.nodes
            return self.sampled_tree(row, row.slots, step.end, budget, k)
        return RankTree(row, self.shape(budget))

    def advance(self, level: int, state: State, tokens: Ids) -> tuple[State, Tensor]:
        z = torch.cat([*state, embed(self.target.decoder, tokens)], dim=-1)
        return (z,), self.heads[level](z)

    def _catch_up(self, rows: Sequence[Row]) -> None:
        """Pass the pending states of these rows through the prefix layer."""
        cursors = {row: self.catch_up.cursors[row] for row in rows}
        pending = {row: cursor for row, cursor in cursors.items() if cursor.count}
        if not pending:
            return
        step_input, states = self.pending(pending)
        x = self.pooled(states.to(self.backend.activations), step_input, self.pool)
        last = [end - 1 for end in step_input.query_start[1:]]
        outputs = self.backend.rms_norm(x[last], self.norm_out, self.pooled.sizes.eps)
        for i, (row, cursor) in enumerate(pending.items()):
            cursor.mark_written()
            cursor.drop_written()
            self.last_states[row] = LastState(cursor.end, outputs[i : i + 1])

    def observe(self, commit: Commit) -> None:
        if self.pooled is None:
            super().observe(commit)
            return
        self.learn(commit)
        full: list[Row] = []
        for r, step in enumerate(commit.batch):
            cursor = self.catch_up.cursor(step.row, step.start)
            cursor.append(step.start, commit.states.of(r, (self.tap,)))
            if step.row.error is None and (step.known > 1 or cursor.count >= MAX_PENDING):
                full.append(step.row)
        self._catch_up(full)
