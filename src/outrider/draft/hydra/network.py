"""Hydra's network for training, with the names and config of the reference's files."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from outrider.core.step import FINAL
from outrider.drafting.base import Target
from outrider.heads.layer import Sizes
from outrider.heads.parts import Layer, ResidualBlock, sizes_config, small_sizes
from outrider.heads.sample import Sample, TargetWeights


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
            parts = {"layers": nn.ModuleList([Layer(prefix)]), "norm": nn.RMSNorm(hidden, prefix.eps)}
            self.prefix_embeding_layer = nn.ModuleDict(parts)
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
        return parts["norm"](parts["layers"][0].over_text(states))  # type: ignore[no-any-return]

    def loss(self, sample: Sample, outer: TargetWeights) -> Tensor:
        """Teacher loss: each head's cross entropy with the target's distribution of its predicted token.

        Head 1 reads P_t, e(x_t+1) and e(x_t+2), and predicts x_t+3, taught by logits[t+2].
        """
        embedded, z = outer.embedding[sample.tokens], self.prefixed(sample.states[FINAL])
        total = embedded.new_zeros(())
        for i, mlp in enumerate(self.hydra_mlp):
            z = torch.cat([z[:-1], embedded[i + 1 :]], dim=-1)
            rows = sample.places(i + 1, len(z))
            x = mlp(z[rows])
            logits = self.hydra_lm_head[i](x) if self.own else outer.logits(x)
            total = total + sample.target_loss(logits, i + 1 + rows)
        return total
