"""Prediction layers for training, with DeepSeek's names and Llama's block."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from outrider.core.step import FINAL
from outrider.drafting.base import Target
from outrider.heads.layer import Sizes
from outrider.heads.parts import Layer, sizes_config, small_sizes
from outrider.heads.sample import Sample, TargetWeights

DECAY = 0.6  # FastMTP's weight of each further depth that the last layer predicts


class PredictionLayer(Layer):
    """A block over eh_proj [enorm(embedding); hnorm(state)], and the norm of its output."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__(sizes)
        hidden = sizes.hidden
        self.enorm, self.hnorm = nn.RMSNorm(hidden, sizes.eps), nn.RMSNorm(hidden, sizes.eps)
        self.eh_proj = nn.Linear(2 * hidden, hidden, bias=False)
        self.eh_proj.weight.data = torch.eye(hidden, 2 * hidden)  # passes the embedding on at first
        self.shared_head = nn.ModuleDict({"norm": nn.RMSNorm(hidden, sizes.eps)})


class Network(nn.Module):
    """first: layers of the target.  layers: prediction layers.  steps: depths in the loss, by default one per
    layer.  prenorm: the layers read states before the target's last norm.
    """

    def __init__(
        self,
        sizes: Sizes,
        vocabulary: int,
        first: int,
        layers: int = 1,
        steps: int | None = None,
        prenorm: bool = False,
    ) -> None:
        super().__init__()
        self.sizes, self.vocabulary, self.first = sizes, vocabulary, first
        self.steps, self.prenorm, self.taps = steps or layers, prenorm, (first if prenorm else FINAL,)
        by_number = nn.ModuleDict({str(first + i): PredictionLayer(sizes) for i in range(layers)})
        self.model = nn.ModuleDict({"layers": by_number})
        self.layers: list[Any] = list(by_number.values())

    @classmethod
    def like(cls, target: Target, **options: Any) -> Network:
        """Small ones for this target, with random weights."""
        spec = target.decoder.spec
        return cls(small_sizes(spec), spec.vocabulary, spec.layers, **options)

    def config(self) -> dict[str, Any]:
        return {
            "architectures": ["DeepSeekMTPModel"],
            "model_type": "deepseek_mtp",
            **sizes_config(self.sizes),
            "vocab_size": self.vocabulary,
            "num_hidden_layers": self.first,
            "num_nextn_predict_layers": len(self.layers),
            "prenorm": self.prenorm,
        }

    def forward(self, tokens: Tensor, states: Tensor, depth: int = 0) -> tuple[Tensor, Tensor]:
        """(states for the next depth, input of the lm_head) of the embeddings and states of one depth, [T,
        hidden] each."""
        layer = self.layers[min(depth, len(self.layers) - 1)]
        x = layer.eh_proj(torch.cat([layer.enorm(tokens), layer.hnorm(states)], dim=-1))
        x = layer.over_text(x)
        normed = layer.shared_head["norm"](x)
        return (x if self.prenorm else normed), normed

    def loss(self, sample: Sample, outer: TargetWeights) -> Tensor:
        """Cross entropy with the target's distribution, on the text's tokens: weighted mean of all depths.

        tokens      x_0   x_1   x_2   x_3 … x_T         pair t of depth k: (state t, x_t+k+1) → p_t+k+1
        states      f_0   f_1   f_2   f_3 … f_T
        depth 0   (f_0    x_1)→ p_1
        depth 1   (h_0          x_2)→ p_2               h_t: output of depth 0 at t
        """
        states, total, weights = sample.states[self.taps[0]], outer.embedding.new_zeros(()), 0.0
        for depth in range(self.steps):
            tokens = outer.embedding[sample.tokens[depth + 1 :]]
            states, out = self(tokens, states[: len(tokens)], depth)
            weight = DECAY ** max(0, depth - len(self.layers) + 1)
            rows = sample.places(depth + 1, len(tokens))
            loss = sample.target_loss(outer.logits(out[rows]), depth + 1 + rows)
            total, weights = total + weight * loss, weights + weight
        return total / weights
