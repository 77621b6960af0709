"""ReDrafter's network for training, with the reference's tensor names."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from outrider.core.step import FINAL
from outrider.draft.redrafter.layouts import MODEL_TYPE
from outrider.heads.parts import ResidualBlock
from outrider.heads.sample import Sample, TargetWeights

STEPS = 5  # in the loss


class Network(nn.Module):
    """layers: residual blocks.

    exit_dim: their width, 2 * hidden unless given.  rnn: otherwise states are sums of embeddings.
    """

    def __init__(
        self, hidden: int, vocabulary: int, layers: int = 2, exit_dim: int | None = None, rnn: bool = True
    ) -> None:
        super().__init__()
        self.hidden, self.vocabulary, self.layers = hidden, vocabulary, layers
        width = self.exit_dim = exit_dim or 2 * hidden
        self.input_proj = nn.Linear(2 * hidden, width) if width != 2 * hidden else None
        blocks = [ResidualBlock(width, width) for _ in range(layers)]
        self.lm_head = nn.Sequential(*blocks, nn.Linear(width, vocabulary, bias=False))
        self.rnn_u = nn.Linear(hidden, hidden) if rnn else None
        self.rnn_w = nn.Linear(hidden, hidden, bias=False) if rnn else None

    def config(self) -> dict[str, Any]:
        return {
            "model_type": MODEL_TYPE,
            "vocab_size": self.vocabulary,
            "hidden_size": self.hidden,
            "exit_dim": self.exit_dim,
            "num_draft_layers": self.layers,
            "rnn": self.rnn_u is not None,
        }

    def step(self, s: Tensor, embedded: Tensor) -> Tensor:
        """The next state [n, hidden], after a token of these embeddings."""
        if self.rnn_u is None or self.rnn_w is None:
            return s + embedded
        return F.silu(self.rnn_w(embedded) + self.rnn_u(s))

    def forward(self, f: Tensor, s: Tensor) -> Tensor:
        """Logits [n, V] of the target's states f and the head's own s, [n, hidden] both."""
        x = torch.cat([f, s], dim=-1)
        logits: Tensor = self.lm_head(x if self.input_proj is None else self.input_proj(x))
        return logits

    def loss(self, sample: Sample, outer: TargetWeights) -> Tensor:
        """Sum over the steps of the mean cross entropy with the text, whose own tokens every step reads.

        s_1 = step(0,   e(x_t+1))    [f_t ; s_1] predicts x_t+2
        s_2 = step(s_1, e(x_t+2))    [f_t ; s_2] predicts x_t+3 …
        """
        f, tokens = sample.states[FINAL], sample.tokens
        embedded, s = F.embedding(tokens, outer.embedding), torch.zeros_like(f)
        total = f.new_zeros(())
        for step in range(1, min(STEPS, len(tokens) - 2) + 1):
            count = len(tokens) - step - 1  # positions t with a token at t + step + 1
            s = self.step(s[:count], embedded[step : step + count])
            rows = sample.places(step, count)
            total = total + sample.text_loss(self(f[rows], s[rows]), step + 1 + rows)
        return total
