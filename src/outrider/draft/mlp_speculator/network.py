"""IBM's MLP speculator, which is Arctic's MLP, for training, with the names and config of IBM's files."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from outrider.core.step import FINAL
from outrider.heads.sample import Sample, TargetWeights
from outrider.heads.speculators import EPS, token_share


class ShiftedNorm(nn.RMSNorm):
    """An RMS norm with a bias."""

    def __init__(self, size: int) -> None:
        super().__init__(size, EPS)
        self.bias = nn.Parameter(torch.zeros(size))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.bias


class Network(nn.Module):
    """inner: width of the recurrent state.  tie_weights: all steps share their weights.  scale_input: the
    target's state is normalized first.
    """

    def __init__(
        self,
        hidden: int,
        inner: int,
        vocabulary: int,
        n_predict: int = 3,
        tie_weights: bool = False,
        scale_input: bool = False,
    ) -> None:
        super().__init__()
        self.hidden, self.inner, self.vocabulary, self.n_predict = hidden, inner, vocabulary, n_predict
        self.tie_weights, self.scale_input = tie_weights, scale_input
        self.share = token_share(n_predict, inner)
        self.head = self._each(lambda _: nn.Linear(inner, vocabulary, bias=False))
        self.emb = self._each(lambda _: nn.Embedding(vocabulary, inner))
        self.proj = self._each(lambda i: nn.Linear(inner if i else hidden, inner, bias=False), apart=1)
        self.ln = self._each(lambda _: ShiftedNorm(inner))
        for module in self.modules():
            if isinstance(module, (nn.Embedding, nn.Linear)):
                nn.init.trunc_normal_(module.weight, std=inner**-0.5)

    def _each(self, make: Callable[[int], nn.Module], apart: int = 0) -> nn.ModuleList:
        """A module for each step; tied, one for all but the first `apart`."""
        shared = make(apart) if self.tie_weights else None
        return nn.ModuleList(
            make(i) if shared is None or i < apart else shared for i in range(self.n_predict)
        )

    def outputs(self, states: Tensor, tokens: Tensor) -> list[Tensor]:
        """The recurrent state [T, inner] after every step.

        states [T, hidden]; tokens [T + n_predict - 1], each after the token of its state.
        """
        s, outputs = states, []
        if self.scale_input:
            s = F.rms_norm(states, states.shape[-1:], eps=EPS) * 0.5**0.5
        for i in range(self.n_predict):
            embedded = self.emb[i](tokens[i : i + len(states)])
            s = F.gelu(self.ln[i](self.proj[i](s) + self.share * embedded))
            outputs.append(s)
        return outputs

    def loss(self, sample: Sample, outer: TargetWeights) -> Tensor:
        """Cross entropy with the text, summed over the steps (IBM's first stage).

        Step 0 reads f_t and x_t+1, and predicts x_t+2;  step 1 reads x_t+2 and predicts x_t+3;  …
        """
        tokens, total = sample.tokens, outer.embedding.new_zeros(())
        count = max(0, len(tokens) - self.n_predict - 1)  # none for a text of too few tokens
        for i, s in enumerate(self.outputs(sample.states[FINAL][:count], tokens[1:])):
            rows = sample.places(i + 1, count)
            total = total + sample.text_loss(self.head[i](s[rows]), i + 2 + rows)
        return total

    def config(self) -> dict[str, Any]:
        return {
            "architectures": ["MLPSpeculatorPreTrainedModel"],
            "model_type": "mlp_speculator",
            "vocab_size": self.vocabulary,
            "n_predict": self.n_predict,
            "tie_weights": self.tie_weights,
            "scale_input": self.scale_input,
            "emb_dim": self.hidden,
            "inner_dim": self.inner,
            "top_k_tokens_per_head": [4, 3, *[2] * self.n_predict][: self.n_predict],
            "n_candidates": 5,
        }
