"""Kangaroo (arXiv 2404.18911): the target's first layers, a small adapter, and the target's lm_head.

    x = layers 0 … early_exit - 1 of the target      K/V in the target's pool
    o = norm(x + attention(norm(x)))                 one attention, two norms, no MLP; K/V in its own pool
    logits = lm_head(o)                              the target's lm_head

    position          …  e-2     e-1   │ e         e = step.end, the token at e-1 is pending
    first layers                 token │ draft     in the slots that verification will use
    adapter              x_e-2   x_e-1 │ x_e       in the same slots of its own pool

The states x of computed tokens come from the target's forward.  Those of the pending token and of draft
tokens are the drafter's, and verification resumes from them (`Resume`).  A dynamic tree is the exception: its
nodes get their slots before they get their numbers.

A draft ends behind a token whose level had no probability of `exit_threshold`.

Published files (Equationliu/Kangaroo) have these names, and the config of a Llama of one layer.  It does not
name the exit.  Their rotations have theta 10000, also where the target's have another.

    layers.0.self_attn.{q,k,v,o}_proj.weight   layers.0.input_layernorm.weight   norm.weight
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, ClassVar

import torch
from torch import Tensor, nn

from outrider.cache.catch_up import CatchUp
from outrider.cache.pool import Pool
from outrider.checkpoints.heads import Head
from outrider.core.device import take
from outrider.core.ragged import Ragged
from outrider.core.row import Row
from outrider.core.step import Batch, Needs
from outrider.core.step_input import StepInput
from outrider.core.tree import ROOT, Budget, Draft, Resume
from outrider.core.validate import Count, Share
from outrider.drafting.base import DEPTHS, Drafter, Target
from outrider.drafting.options import check_exit
from outrider.drafting.trees.builder import LevelBuilder
from outrider.heads.base import ONE, random_head
from outrider.heads.layer import Sizes, Stack
from outrider.heads.layouts import UNCHANGED, HeadFormat, Layout
from outrider.heads.parts import Layer, sizes_config, small_sizes
from outrider.heads.ranks import chain_paths
from outrider.heads.reader import Reader
from outrider.heads.recurrent import CHAIN, TREE, Forwards, Reading, Recurrent, RecurrentOptions
from outrider.heads.recurrent_net import Net
from outrider.heads.sample import Sample, TargetWeights
from outrider.heads.trees import Growth, LevelTree, RankTree

NAMES = r"layers\.\d+\.(self_attn\.[qkvo]_proj|input_layernorm)\.weight|norm\.weight"
ATTENTION_ONLY = re.compile(rf"{NAMES}|.*\.rotary_emb\.inv_freq")
EXIT = "early_exit"  # key in the config of trained files


def _without_rope(head: Head) -> Head:
    """The head with rotations of theta 10000: the reference does not read those of the config."""
    config = {key: value for key, value in head.config.items() if not key.startswith("rope_")}
    return replace(head, config=config)


FORMAT = HeadFormat(
    (
        Layout(
            "reference",
            ("layers.{i}.self_attn.q_proj.weight",),
            (("{rest}.rotary_emb.inv_freq", None), *UNCHANGED),
            applies=lambda head: all(ATTENTION_ONLY.fullmatch(name) for name in head),
        ),
    ),
    hidden=(("norm.weight", 0),),
    known=NAMES,
    finish=_without_rope,
)


def published_exit(layers: int) -> int:
    """The exit of the published adapters: Vicuna 7B's is after 2 of 32 layers, 13B's after 3 of 40."""
    return min(2 if layers < 40 else 3, layers - 1)


class Network(nn.Module):
    """Network for training, with the reference's names and config, after `early_exit` layers."""

    def __init__(self, sizes: Sizes, vocabulary: int, early_exit: int) -> None:
        super().__init__()
        self.sizes, self.vocabulary, self.early_exit = replace(sizes, inner=0), vocabulary, early_exit
        self.layers = nn.ModuleList([Layer(self.sizes)])
        self.norm = nn.RMSNorm(sizes.hidden, sizes.eps)

    @classmethod
    def like(cls, target: Target) -> Network:
        """A small one for this target, after a half of the layers."""
        spec = target.decoder.spec
        return cls(small_sizes(spec), spec.vocabulary, max(1, spec.layers // 2))

    def config(self) -> dict[str, Any]:
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            **sizes_config(self.sizes),
            "intermediate_size": 4 * self.sizes.hidden,  # a config needs one; nothing has it
            "num_hidden_layers": 1,
            "vocab_size": self.vocabulary,
            EXIT: self.early_exit,
        }

    def forward(self, x: Tensor, texts: Ragged | None = None) -> Tensor:
        """o [T, hidden] of the states x [T, hidden] that leave the first layers.  texts: if several."""
        (layer,) = self.layers
        assert isinstance(layer, Layer)
        out: Tensor = self.norm(layer.over_texts(x, texts))
        return out

    def loss(self, sample: Sample, outer: TargetWeights) -> Tensor:
        """Cross entropy with the target's distribution of the same token."""
        rows = sample.places(0, len(sample.tokens))
        o = self(sample.states[self.early_exit], sample.texts).index_select(0, rows)
        return sample.target_loss(outer.logits(o), rows)


@dataclass(frozen=True)
class KangarooOptions(RecurrentOptions):
    """early_exit: number of the target's layers that draft; None: the file's, or that of the published
        adapters: 2, for 40 layers and more 3.
    exit_threshold: a draft ends behind a token if nothing was as probable as this there.  None: it does not.
    tree, top_k, nodes: as of `RecurrentOptions`, with "chain" as the default.
    """

    tree: Annotated[str, TREE] = CHAIN
    draft_tensor_parallel_size: Annotated[int, ONE] = 1
    early_exit: Count | None = None
    exit_threshold: Share | None = 0.6


class ExitNet(Net):
    """The adapter on the target's kernels.  below: the target's layers below the exit, `layer` of them."""

    def __init__(self, reader: Reader, target: Target, layer: int) -> None:
        super().__init__(reader, target)
        self.layer, self.taps, hidden = layer, (layer,), self.model.spec.hidden
        self.below = self.model.layer_range(0, layer)
        count = sum(name.endswith(".self_attn.q_proj.weight") for name in self.head)
        self.stack = Stack(reader, target, [f"layers.{i}" for i in range(count)], hidden, mlp=False)
        self.norm = reader.vector("norm.weight", hidden)

    def forward(self, step_input: StepInput, pool: Pool, g: Tensor) -> Tensor:
        return self.stack(g, step_input, pool)

    def exit_states(self, step_input: StepInput, pool: Pool) -> Tensor:
        """x [n, hidden] of the rows of a step; K/V goes to the target's pool."""
        return self.model.forward(step_input, pool, self.below)


@dataclass
class Computed:
    """States of `nodes` of a tree, ROOT included, whose K/V is where verification will have it."""

    row: Row
    nodes: list[int] = field(default_factory=list)
    states: list[Tensor] = field(default_factory=list)


class ExitForwards(Forwards):
    """Forwards of the adapter after the target's first layers; a catch-up also reads the pending tokens."""

    net: ExitNet
    on_device = False

    def __init__(self, drafter: Kangaroo, readings: Sequence[Reading]) -> None:
        super().__init__(drafter, readings)
        self.target_pool = drafter.target_pool
        self.computed: dict[LevelTree, Computed] = {}

    def catch_up(self) -> Tensor:
        step_input, pending = StepInput(), StepInput()
        for reading in self.readings:
            step_input.chain(reading.table, reading.cursor.first, [0] * reading.cursor.count)
        first, states = step_input.length, self.states
        for reading in self.readings:
            if (tree := reading.tree) is not None:
                row, own = reading.row, pending.length
                self.computed[tree] = Computed(row)
                step_input.chain(reading.table, tree.base - 1, [0])
                pending.chain(reading.table, tree.base - 1, row.tokens[tree.base - 1 : tree.base])
                if row.adapter is not None:
                    pending.adapt(own, row.adapter)
        if pending.length:
            below = self.net.exit_states(pending.build(), self.target_pool)
            states = torch.cat([states, below])
            for computed, state in zip(self.computed.values(), states[first:].clone()):
                computed.nodes.append(ROOT)
                computed.states.append(state)
        o = self.net.forward(step_input.build(), self.pool, states)
        return take(o, list(range(first, step_input.length)))

    def deepen(self, level: int, trees: Sequence[LevelTree], o: Tensor) -> Tensor:
        step_input, first_rows = StepInput(), list[int]()
        for tree in trees:
            own, row = step_input.length, self.computed[tree].row
            first_rows.append(own)
            tree.add_to(step_input)
            if row.adapter is not None:
                step_input.adapt(own, row.adapter)
        states = self.net.exit_states(step_input.build(), self.target_pool)
        for tree, own in zip(trees, first_rows):
            if isinstance(tree, LevelBuilder):  # node i is in slot i
                computed, nodes = self.computed[tree], tree.frontier
                computed.nodes += nodes
                computed.states += states[own : own + len(nodes)].clone()
        return self.net.forward(step_input, self.pool, states)


class Kangaroo(Recurrent):
    """computed: of the trees that were grown last, by row, until `propose` returns."""

    FORMAT = FORMAT
    Options = KangarooOptions
    tunable: ClassVar = {**DEPTHS, "exit_threshold": (0.3, 0.8)}
    depth = 6
    net: ExitNet

    def __init__(self, options: Any, target: Target, head: Head | None = None) -> None:
        super().__init__(options, target, head)
        self.needs, self.catch_up = Needs(states=self.net.taps), CatchUp()
        self.computed: dict[Row, Computed] = {}

    @classmethod
    def example(cls, target: Target) -> Drafter:
        """A random adapter after a half of the layers, and a static tree."""
        options = cls.Options(tree="mc_sim_7b_63", nodes=24, exit_threshold=None)
        return cls(options, target, random_head(Network.like, target))

    def network(self) -> ExitNet:
        layers = self.target.decoder.spec.layers
        given = (self.options.early_exit, self.head.config.get(EXIT), published_exit(layers))
        layer = next(number for number in given if number is not None)
        return ExitNet(self.reader, self.target, check_exit(layer, layers, self.target.checkpoint.name))

    def allocate(self, slots: int, pool: Pool) -> Any:
        self.target_pool = pool
        return super().allocate(slots, pool)

    def forwards(self, readings: Sequence[Reading]) -> ExitForwards:
        return ExitForwards(self, readings)

    def _tree(self, row: Row, table: Any, base: int, budget: Budget) -> LevelTree:
        if self.options.tree != CHAIN or self.samples(row):
            return super()._tree(row, table, base, budget)
        return RankTree(row, chain_paths(budget.depth), base, table)

    def propose(self, batch: Batch) -> Draft:
        self.computed = {}
        draft = super().propose(batch)
        found = [self.computed.get(row, Computed(row)) for row in batch.rows]
        self.computed = {}
        states = [state for computed in found for state in computed.states]
        if not states:
            return draft
        return Draft(draft.trees, Resume(self.net.layer, torch.stack(states), [own.nodes for own in found]))

    def _grow(self, forwards: Forwards, trees: list[LevelTree]) -> None:
        """Catch up, then grow all trees until no probability reaches the threshold."""
        assert isinstance(forwards, ExitForwards)
        o, growth = self._catch_up(forwards), Growth(trees, self.choose)
        while trees:
            logits = forwards.logits(growth.level, o)
            if not growth.add(logits, self._ending(growth.trees, logits)):
                break
            o = forwards.deepen(growth.level, growth.trees, o)
        for tree, computed in forwards.computed.items():
            if isinstance(tree, LevelBuilder):
                self.computed[computed.row] = computed

    def _ending(self, trees: Sequence[LevelTree], logits: Tensor) -> list[LevelTree]:
        """The trees whose next level is the last one.  Logits decide, so that drafts stay samples of q."""
        threshold: float | None = self.options.exit_threshold
        if threshold is None:
            return []
        highest = (logits.amax(-1) - logits.logsumexp(-1)).exp().cpu()
        parts = torch.split(highest, [len(tree.sources) for tree in trees])
        return [tree for tree, own in zip(trees, parts) if float(own.max()) < threshold]
