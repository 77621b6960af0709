"""P-EAGLE (arXiv 2602.01469): an EAGLE-3 head that drafts all tokens in one pass.

After the pair of the pending token come further positions, for which neither state nor token is known:

    position        …  e-3              e-2         │    e-1         e        …     e = step.end
    state           f_e-3            f_e-2          │  mask_hidden  mask_hidden
    token           x_e-2            x_e-1          │  mask_token   mask_token
    its logits are for               e              │    e+1         e+2      …

They attend to the pairs and to the masks before them.  Their K/V is scratch, in the slots of draft tokens.
Pairs and K/V: see heads/recurrent.py.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar, Self

import torch
from torch import Tensor, nn

from outrider.checkpoints.heads import Head
from outrider.core.device import take
from outrider.core.row import Row
from outrider.core.step_input import StepInput
from outrider.core.tree import Budget
from outrider.core.validate import is_whole, whole
from outrider.draft import eagle3
from outrider.drafting.base import DEPTHS, Drafter, Target
from outrider.errors import ModelError
from outrider.heads.base import random_head
from outrider.heads.depth_rows import DepthRows
from outrider.heads.device_trees import grow_blocks
from outrider.heads.layouts import speculators
from outrider.heads.parts import Layer, rotary_angles, soft_cross_entropy
from outrider.heads.ranks import Path, chain_paths, prior_paths
from outrider.heads.reader import Reader
from outrider.heads.recurrent import CHAIN, Forwards, Reading, Recurrent
from outrider.heads.sample import Sample, TargetWeights, mean_loss
from outrider.heads.tapped import TapNet, TapOptions, is_parallel
from outrider.heads.tapped_parts import SPECULATORS, PathLayer, TapNetwork
from outrider.heads.trees import BlockTree, LevelTree

ANCHORS = 128  # of a text, at most, in one loss
KEPT, LEAST = 0.7, 0.2  # share of the anchors that have the next depth, too; least share of all


class Network(TapNetwork):
    """Network for training, with the names of speculators' files.

    Row (a, 0) of `DepthRows` is EAGLE-3's pair (f_a, x_a+1); deeper ones have neither state nor token.  Row
    (a, d) predicts x_a+d+2.
    """

    def __init__(self, *tap: Any, mask: int, layers: int = 1, depths: int = 8, **options: Any) -> None:
        """tap, options: as of `TapNetwork`.  mask: token id of positions without a token.  depths: levels in
        the loss.
        """
        super().__init__(*tap, **options)
        self.mask, self.depths = mask, depths
        self.mask_hidden = nn.Parameter(torch.randn(1, 1, len(self.taps) * self.sizes.hidden))
        further = (Layer(self.sizes) for _ in range(layers - 1))
        self.layers = nn.ModuleList([PathLayer(self.sizes), *further])

    @classmethod
    def like(cls, target: Target, **options: Any) -> Self:
        return super().like(target, **{"mask": target.vocabulary - 1, "depths": 4, **options})

    def config(self) -> dict[str, Any]:
        own = {**SPECULATORS, "mask_token_id": self.mask, **self.head_config()}
        layer = self.layer_config(len(self.layers))
        return speculators("peagle", "PEagleDraftModel", self.depths, layer, own)

    def forward(
        self, states: Tensor, tokens: Tensor, embedding: Tensor, anchors: Tensor, depth: Tensor
    ) -> Tensor:
        """Logits [n, Vd] of the rows of `DepthRows`, those of depth 0 first and for all places.

        states [T, taps * hidden]; tokens [T + 1].
        """
        known = (depth == 0)[:, None]
        places = anchors.clamp_max(len(states) - 1)
        g = self.fc(torch.where(known, states[places], self.mask_hidden[0]))
        ids = torch.where(known[:, 0], tokens[places + 1], self.mask)
        first: Any = self.layers[0]
        angles = rotary_angles(anchors + depth, first.self_attn.head_dim)
        attended = DepthRows(anchors, depth).attended
        u = torch.cat([first.input_layernorm(embedding[ids]), first.hidden_norm(g)], dim=-1)
        x = first.feed_forward(g + first.self_attn(u, angles, attended))
        for layer in self.layers[1:]:
            x = layer(x, angles, attended)
        logits: Tensor = self.lm_head(self.norm(x))
        return logits

    def rows(self, sample: Sample) -> DepthRows:
        """Rows of one loss: all places, then a random part of those that count."""
        count = len(sample.tokens) - 1
        found = sample.places(1, count - 1)
        anchors = found[torch.randperm(len(found), device=found.device)[:ANCHORS]]
        return DepthRows.of(count, anchors, [max(KEPT**depth, LEAST) for depth in range(1, self.depths)])

    def loss(self, sample: Sample, outer: TargetWeights) -> Tensor:
        """Mean cross entropy with the target over the rows whose likeliest token is one of the head's."""
        states = torch.cat([sample.states[tap] for tap in self.taps], dim=-1)[:-1]
        anchors, depth = self.rows(sample)
        logits = self(states, sample.tokens, outer.embedding, anchors, depth)
        places = anchors + depth + 1
        counted = torch.ones_like(places, dtype=torch.bool)
        if sample.mask is not None:
            counted = sample.mask.to(places.device)[places]
        theirs = sample.logits[places, : self.vocabulary]
        counted = counted & self.known(theirs)
        return mean_loss(soft_cross_entropy(logits[counted], theirs[counted][:, self.ids]))


RANKS, MAX_NODES = 8, 1024
MASKS = ("mask_token_id", "ptd_token_id")  # keys of configs: of speculators, of vLLM's first files
FORMAT = replace(eagle3.FORMAT, kinds="peagle|PEagle.*")  # and `mask_hidden` [1, 1, taps * hidden]


class PEagleNet(TapNet):
    """masked [1, width]: g of the positions without a state."""

    def __init__(self, reader: Reader, target: Target, options: TapOptions) -> None:
        super().__init__(reader, target, options)
        head, most = reader.head, target.vocabulary - 1
        mask = next((head.config[key] for key in MASKS if key in head.config), -1)
        whole(0, most).check(mask, f"{MASKS[0]} of {head.name!r}", ModelError)
        self.mask = int(mask)
        wide, hidden = len(self.taps) * self.model.spec.hidden, head.raw("mask_hidden").float().reshape(1, -1)
        if hidden.shape[1] != wide:
            raise head.misfit(f"its mask_hidden has {hidden.shape[1]} values, and {wide} are needed")
        self.masked = self.from_states(hidden.to(self.backend.device, self.backend.activations)).clone()


class OnePass(Forwards):
    """The only forward of a step: pending pairs, and behind them the masks of all further levels."""

    def catch_up(self) -> Tensor:
        """o of every level of the rows that draft, [sum of their depths, width]."""
        net: PEagleNet = self.net  # type: ignore[assignment]
        step_input, kept, parts = StepInput(), list[int](), list[Tensor]()
        counts = [reading.cursor.count for reading in self.readings]
        for reading, g in zip(self.readings, torch.split(net.from_states(self.states), counts)):
            first, end, tree = reading.cursor.first, reading.cursor.end, reading.tree
            masks = tree.budget.depth - 1 if isinstance(tree, BlockTree) else 0
            tokens = [*reading.row.tokens[first + 1 : end + 1], *[net.mask] * masks]
            step_input.chain(reading.table[1:], first, tokens)
            parts += [g, net.masked.expand(masks, -1)]
            if tree is not None:
                kept += range(step_input.length - masks - 1, step_input.length)
        return take(net.forward(step_input.build(), self.pool, torch.cat(parts)), kept)


class PEagle(Recurrent):
    FORMAT = FORMAT
    tunable: ClassVar = {**DEPTHS, "nodes": (4, 16)}

    @dataclass(frozen=True)
    class Options(TapOptions):
        """nodes: of a tree of the likeliest ranks (None: a chain).  The others as EAGLE-3's."""

        tree: ClassVar[str] = CHAIN

        nodes: Annotated[int, whole(1, MAX_NODES)] | None = None

    def __init__(self, options: Options, target: Target, head: Head | None = None) -> None:
        super().__init__(options, target, head)
        try:
            proposal = self.head.config["speculators_config"]["proposal_methods"][0]
            depth = proposal["speculative_tokens"]
        except (KeyError, IndexError, TypeError):
            depth = None
        self.depth = depth if is_whole(depth, 1, 64) else self.depth

    def network(self) -> PEagleNet:
        return PEagleNet(self.reader, self.target, self.options)

    def forwards(self, readings: Sequence[Reading]) -> Forwards:
        return OnePass(self, readings)

    @classmethod
    def claims(cls, head: Head) -> int:
        """2: EAGLE-3's layers, and a state for positions that have none."""
        return 2 if is_parallel(head) else int(cls.FORMAT.named_in(head.config))

    @classmethod
    def example(cls, target: Target) -> Drafter:
        """Two random layers over two thirds of the tokens, and a tree of 8."""
        return cls(cls.Options(nodes=8), target, random_head(Network.like, target, layers=2))

    def size(self, depth: int) -> int:
        if self.options.nodes is None or depth == 0:
            return depth
        nodes: int = self.options.nodes
        return min(nodes, RANKS) if depth == 1 else max(depth, nodes)

    def _tree(self, row: Row, table: array[int], base: int, budget: Budget) -> LevelTree:
        """An empty tree, whose logits come with the pass."""
        shape: Sequence[Path] = chain_paths(budget.depth)
        if self.options.nodes is not None:
            shape = prior_paths(budget.nodes, budget.depth, RANKS)
        return BlockTree(row, torch.empty(0), shape, self.samples(row), self.target.stream_id)

    def _grow(self, forwards: Forwards, trees: list[LevelTree]) -> None:
        o = self._catch_up(forwards)
        blocks = [tree for tree in trees if isinstance(tree, BlockTree)]
        if blocks:
            depths = [tree.budget.depth for tree in blocks]
            for tree, logits in zip(blocks, torch.split(self.net.logits(o), depths)):
                tree.logits = logits
        grow_blocks(blocks, self.choose)
