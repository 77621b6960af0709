"""EAGLE's network for training, with the names and config of the reference's files."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from outrider.core.step import FINAL
from outrider.drafting.base import Target
from outrider.heads.layer import Sizes
from outrider.heads.parts import Layer, sizes_config, small_sizes, soft_cross_entropy
from outrider.heads.sample import Sample, TargetWeights, mean_loss

# Width of the uniform noise on states in training, at up to NOISE_LENGTH tokens, and less for longer texts:
# recurrent states are inexact, too.
NOISE, NOISE_LENGTH = 0.2, 512
TOKEN_WEIGHT = 0.1  # of the cross entropy beside the loss of the states


class Network(nn.Module):
    """fc over [embedding; state], then one layer without an input norm."""

    def __init__(self, sizes: Sizes, vocabulary: int, bias: bool = True) -> None:
        super().__init__()
        self.sizes, self.vocabulary = sizes, vocabulary
        self.fc = nn.Linear(2 * sizes.hidden, sizes.hidden, bias=bias)
        self.layers = nn.ModuleList([Layer(sizes, norm_in=False)])

    @classmethod
    def like(cls, target: Target, **options: Any) -> Network:
        """A small one for this target, with random weights."""
        spec = target.decoder.spec
        return cls(small_sizes(spec), spec.vocabulary, **options)

    def config(self) -> dict[str, Any]:
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            **sizes_config(self.sizes),
            "num_hidden_layers": 1,
            "vocab_size": self.vocabulary,
            "bias": self.fc.bias is not None,
        }

    def forward(self, tokens: Tensor, states: Tensor, last: int | None = None) -> Tensor:
        """Predicted states f_1 … f_T of the embeddings e(x_1) … e(x_T) and the states f_0 … f_T-1, each
        [T, hidden].  last: so many last ones only."""
        (layer,) = self.layers
        assert isinstance(layer, Layer)
        return layer.over_text(self.fc(torch.cat([tokens, states], dim=-1)), last)

    def loss(self, sample: Sample, outer: TargetWeights) -> Tensor:
        """Smooth L1 of the states plus a tenth of the cross entropy with the target's distribution.

        tokens    x_0   x_1   x_2 … x_T            pair t is (f_t, x_t+1); its output o_t approximates f_t+1
        states    f_0   f_1   f_2 … f_T
        pair            0     1   … T-1
        """
        states, count = sample.states[FINAL], len(sample.tokens) - 1
        width = NOISE * min(1.0, NOISE_LENGTH / count) * self.training
        noise = (torch.rand_like(states[:count]) - 0.5) * width
        rows = sample.places(1, count)
        start = int(rows[0]) if len(rows) else 0
        out = self(outer.embedding[sample.tokens[1:]], states[:count] + noise, count - start)[rows - start]
        tokens = soft_cross_entropy(outer.logits(out), sample.logits[1 + rows])
        features = F.smooth_l1_loss(out.float(), states[1 + rows], reduction="none").mean(-1)
        return mean_loss(features + TOKEN_WEIGHT * tokens)
