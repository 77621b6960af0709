"""Hydra's network for training, with the names and config of the reference's files.

The reference also saves two copies of the target's embedding (input_embed_fn and the prefix layer's own).  No
reader needs them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from outrider.core.step import FINAL
from outrider.drafting.base import Target
from outrider.heads.layer import Sizes
from outrider.heads.parts import Layer, ResidualBlock, RmsNorm, sizes_config, small_sizes, soft_cross_entropy
from outrider.heads.sample import Sample, TargetWeights, mean_loss

THETA = 10000.0


class PrefixLayer(nn.Module):
    """One Llama block and a norm, over a whole text."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer(sizes)])
        self.norm = RmsNorm(sizes.hidden, sizes.eps)

    def forward(self, states: Tensor) -> Tensor:
        """P_0 … of f_0 …, [T, hidden] both."""
        (layer,) = self.layers
        assert isinstance(layer, Layer)
        normed: Tensor = self.norm(layer.over_text(states, THETA))
        return normed


class Network(nn.Module):
    """prefix: sizes of the prefix layer of a `prefix-mlp` head, None for a plain `mlp` head.
    own: every head has an lm_head; otherwise they use the target's."""

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
        drop = [nn.Dropout(dropout)] if prefix else []
        if prefix:
            self.prefix_embeding_layer = PrefixLayer(prefix)
        self.hydra_mlp, self.hydra_lm_head = nn.ModuleList(), nn.ModuleList()
        for i in range(heads):
            first, again = ResidualBlock((i + 2) * hidden, hidden), ResidualBlock(hidden, hidden)
            for block in (first, again):
                nn.init.zeros_(block.linear.weight)
            self.hydra_mlp.append(nn.Sequential(*drop, first, *([*drop, again] * (layers - 1))))
        for _ in range(heads if own else 0):
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
        """The reference's keys, and the sizes of the prefix layer, which the reference takes from the
        target."""
        return {
            "hydra_head_arch": "prefix-mlp" if self.prefix else "mlp",
            "hydra_num_heads": len(self.hydra_mlp),
            "hydra_num_layers": self.layers,
            "grounded_heads": True,
            "hidden_state_offset": 0,
            **({**sizes_config(self.prefix), "rope_theta": THETA} if self.prefix else {}),
        }

    def forward(self, states: Tensor, embedded: Tensor, outer: TargetWeights | None = None) -> list[Tensor]:
        """Logits [T - 1 - i, V] of each head i for t = 0, 1, …

        states f_0 … and embeddings e(x_0) …: [T, hidden] both

        outer: the target's weights, for heads without an lm_head.
        """
        inputs = self.inputs(states, embedded)
        return [self.logits(i, z, outer) for i, z in enumerate(inputs)]

    def inputs(self, states: Tensor, embedded: Tensor) -> list[Tensor]:
        """z [T - 1 - i, inputs] of each head i."""
        z: Tensor = self.prefix_embeding_layer(states) if self.prefix else states
        inputs = []
        for i in range(len(self.hydra_mlp)):
            z = torch.cat([z[:-1], embedded[i + 1 :]], dim=-1)
            inputs.append(z)
        return inputs

    def logits(self, i: int, z: Tensor, outer: TargetWeights | None = None) -> Tensor:
        """[n, V] of head i for its inputs [n, inputs]."""
        x: Tensor = self.hydra_mlp[i](z)
        if self.own:
            return self.hydra_lm_head[i](x)  # type: ignore[no-any-return]
        assert outer is not None
        return outer.logits(x)

    def loss(self, sample: Sample, outer: TargetWeights) -> Tensor:
        """Teacher loss: each head's cross entropy with the target's distribution of its predicted token.

        position          t          t+1        t+2        t+3
        token             x_t        x_t+1      x_t+2      x_t+3
        state             f_t  ─►  P_t, over f_0 … f_t
        head 0 reads      P_t        e(x_t+1)                       predicts x_t+2, taught by logits[t+1]
        head 1 reads      P_t        e(x_t+1)   e(x_t+2)            predicts x_t+3, taught by logits[t+2]
        """
        total = outer.embedding.new_zeros(())
        for i, z in enumerate(self.inputs(sample.states[FINAL], outer.embedding[sample.tokens])):
            rows = sample.places(i + 1, len(z))
            theirs = sample.logits[i + 1 + rows]
            total = total + mean_loss(soft_cross_entropy(self.logits(i, z[rows], outer), theirs))
        return total
