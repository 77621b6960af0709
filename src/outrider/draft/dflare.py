"""DFlare (arXiv 2606.02091): a block (heads/blocks.py) whose layers each have their own mix of the target's
states.

    g_i = norm(Σ_t softmax(layer_fusion_weights[i])_t · state_t)      input of layer i's K and V of the text

K and V of the text have projections of their own, k_proj_target and v_proj_target, beside those of the block.
There is no fc.  Published files (AngelSlim) are a block's in z-lab's format, with these tensors.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from outrider.checkpoints.heads import Head
from outrider.drafting.base import Drafter, Target
from outrider.heads.base import random_head
from outrider.heads.block_layouts import block_format
from outrider.heads.block_parts import BlockLayer, BlockNetwork
from outrider.heads.blocks import BlockDrafter, BlockOptions

ARCHITECTURES = r".*DFlare.*"
TYPE, FUSION = "dflare", "layer_fusion_weights"
FORMAT = block_format(
    f"{TYPE}|{ARCHITECTURES}",
    known=rf"{FUSION}|layers\.\d+\.self_attn\.[kv]_proj_target\.(weight|bias)",
    states=(("hidden_norm.weight", 0),),
)


class FlareLayer(BlockLayer):
    """A layer with projections of its own for the text."""

    def __init__(self, sizes: Any) -> None:
        super().__init__(sizes, qk_norm=True)
        kv = sizes.kv_heads * sizes.head_dim
        self.self_attn.k_proj_target = nn.Linear(sizes.hidden, kv, bias=False)
        self.self_attn.v_proj_target = nn.Linear(sizes.hidden, kv, bias=False)

    def context_keys(self, context: Tensor, angles: Tensor) -> Tensor:
        attention: Any = self.self_attn
        return self.self_attn.rotated_keys(attention.k_proj_target(context), angles)

    def context_values(self, context: Tensor) -> Tensor:
        attention: Any = self.self_attn
        return self.self_attn.split(attention.v_proj_target(context))


class Network(BlockNetwork):
    """Network for training, with the published names and config."""

    def __init__(self, *block: Any, **options: Any) -> None:
        """block, options: as of `BlockNetwork`.  Each layer begins with one state, as in the reference."""
        super().__init__(*block, **options)
        layers, taps = len(self.layers), len(self.taps)
        del self.fc
        self.layers = nn.ModuleList(FlareLayer(self.sizes) for _ in range(layers))
        weights = torch.zeros(layers, taps)
        weights[range(layers), [layer * taps // layers for layer in range(layers)]] = 2.0
        self.layer_fusion_weights = nn.Parameter(weights)

    @classmethod
    def like(cls, target: Target, inner: int | None = None, **options: Any) -> Network:
        network = super().like(target, inner, **options)
        for layer in network.layers:
            attention: Any = layer.self_attn
            attention.v_proj_target.weight.data.copy_(attention.v_proj.weight.data)
        return network

    def config(self) -> dict[str, Any]:
        own = {"mask_token_id": self.mask, "target_layer_ids": [tap - 1 for tap in self.taps]}
        outer = {"architectures": ["DFlareQwen3Model"], "block_size": self.block, "dflash_config": own}
        return {**self.layer_config(), **outer}

    def contexts(self, taps: Tensor) -> Sequence[Tensor]:
        states = taps.view(len(taps), len(self.taps), -1)
        mixes: Tensor = self.hidden_norm(fused(states, self.layer_fusion_weights))
        return mixes.unbind(1)


def fused(states: Tensor, weights: Tensor) -> Tensor:
    """[n, layers, h] of the states [n, taps, h]; weights [layers, taps] before the softmax."""
    return torch.einsum("nth,lt->nlh", states, weights.softmax(-1).to(states.dtype))


class DFlare(BlockDrafter):
    FORMAT = FORMAT
    kind, tensors = TYPE, FUSION
    signs = ("hidden_norm.weight", FUSION, "layers.0.self_attn.q_norm.weight")
    Options = BlockOptions

    @classmethod
    def example(cls, target: Target) -> Drafter:
        """Two random layers, and a tree of 8."""
        return cls(cls.Options(nodes=8), target, random_head(Network.like, target, block=5))

    @classmethod
    def width_of(cls, head: Head) -> int:
        return head.shape("hidden_norm.weight")[0]

    def read_context(self, names: Sequence[str], kv: int) -> None:
        taps, layers = len(self.layout.taps), len(names)
        self.fusion = self.head.get(FUSION, layers, taps).float().to(self.backend.device)
        self.kv = [
            self.reader.fused([(f"{name}.self_attn.{one}_proj_target", kv) for one in "kv"], self.hidden)
            for name in names
        ]

    def context_kv(self, states: Tensor) -> Iterator[Tensor]:
        run, eps = self.backend, self.stack.sizes.eps
        mixes = fused(states.view(len(states), -1, self.hidden), self.fusion)
        for mix, kv in zip(mixes.unbind(1), self.kv):
            yield run.linear(run.rms_norm(mix.contiguous(), self.hidden_norm, eps), kv)
