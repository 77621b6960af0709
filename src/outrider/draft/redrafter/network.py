"""The network, with the reference's tensor names, and what it learns.

    position                    t       t+1     t+2     t+3
    state of the target         f_t                              after its last norm: what it says x_t+1 from
    token                       x_t     x_t+1   x_t+2   x_t+3
    s_1 = step(0,   e(x_t+1))           │               [f_t ; s_1] says x_t+2
    s_2 = step(s_1, e(x_t+2))                   │       [f_t ; s_2] says x_t+3
    …                                                   f_t stays, however many steps there are

While learning every step reads the text's own token, whatever the step before would have said.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from outrider.core.types import FINAL
from outrider.draft.redrafter.layouts import MODEL_TYPE
from outrider.heads.sample import Sample, TargetWeights

STEPS = 5  # that it learns to predict


class ResBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.silu(self.linear(x))


class Network(nn.Module):
    """layers: residual blocks.  exit_dim: their width, 2 * hidden unless given.  rnn: without, states are sums of embeddings."""

    def __init__(
        self, hidden: int, vocabulary: int, layers: int = 2, exit_dim: int | None = None, rnn: bool = True
    ) -> None:
        super().__init__()
        self.hidden, self.vocabulary, self.layers, self.exit_dim = (
            hidden,
            vocabulary,
            layers,
            exit_dim or 2 * hidden,
        )
        self.input_proj = nn.Linear(2 * hidden, self.exit_dim) if self.exit_dim != 2 * hidden else None
        self.lm_head = nn.Sequential(
            *(ResBlock(self.exit_dim) for _ in range(layers)),
            nn.Linear(self.exit_dim, vocabulary, bias=False),
        )
        self.rnn_u = nn.Linear(hidden, hidden) if rnn else None
        self.rnn_w = nn.Linear(hidden, hidden, bias=False) if rnn else None

    def config(self) -> dict[str, Any]:
        return {
            "model_type": MODEL_TYPE, "vocab_size": self.vocabulary, "hidden_size": self.hidden, "exit_dim": self.exit_dim,
            "num_draft_layers": self.layers, "rnn": self.rnn_u is not None,
        }  # fmt: skip

    def step(self, s: Tensor, embedded: Tensor) -> Tensor:
        """The next state [n, hidden], after a token of these embeddings."""
        if self.rnn_u is None or self.rnn_w is None:
            return s + embedded
        return F.silu(self.rnn_w(embedded) + self.rnn_u(s))

    def forward(self, f: Tensor, s: Tensor) -> Tensor:
        """Logits [n, V] of the target's states [n, hidden] and the head's own."""
        x = torch.cat([f, s], dim=-1)
        logits: Tensor = self.lm_head(x if self.input_proj is None else self.input_proj(x))
        return logits

    def loss(self, sample: Sample, outer: TargetWeights) -> Tensor:
        """The sum over the steps of the mean cross entropy of each."""
        f, tokens = sample.states[FINAL], sample.tokens
        embedded, s = F.embedding(tokens, outer.embedding), torch.zeros_like(f)
        total = f.new_zeros(())
        for step in range(1, min(STEPS, len(tokens) - 2) + 1):
            known = len(tokens) - step - 1  # how many t have a token at t + step + 1
            s = self.step(s[:known], embedded[step : step + known])
            total = total + F.cross_entropy(self(f[:known], s), tokens[step + 1 :])
        return total
