"""MLP speculators for training, with the names and config of their authors' files."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from outrider.core.step import FINAL
from outrider.draft.mlp_speculator.layouts import GATES, LSTM, RNN
from outrider.heads.parts import RmsNorm, rms_normalize
from outrider.heads.sample import Sample, TargetWeights, mean_loss

EPS = 1e-6


def norm(size: int) -> RmsNorm:
    return RmsNorm(size, EPS, shift=True)


def token_share(n_predict: int, width: int) -> float:
    """Weight of a token's embedding beside the state."""
    sw: float = 0.5 ** (0.5 / n_predict)
    return math.sqrt((1 - sw**2) * width / 2) / sw


class Speculator(nn.Module):
    """Common to all variants: the lm_heads, the loop over the steps, and the loss."""

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
        self.head = self.each(lambda _: nn.Linear(inner, vocabulary, bias=False))

    def each(self, make: Callable[[int], nn.Module], apart: int = 0) -> nn.ModuleList:
        """A module for each step; tied, one for all but the first `apart`."""
        if not self.tie_weights:
            return nn.ModuleList(make(i) for i in range(self.n_predict))
        shared = make(apart)
        return nn.ModuleList(make(i) if i < apart else shared for i in range(self.n_predict))

    def reset(self) -> None:
        for module in self.modules():
            if isinstance(module, (nn.Embedding, nn.Linear)):
                nn.init.trunc_normal_(module.weight, std=self.inner**-0.5)

    def adopt(self, outer: TargetWeights) -> None:
        """Copies the target's embedding and lm_head (Arctic's "from_model").

        Requires `inner` to be the target's hidden size.
        """
        with torch.no_grad():
            for module in self.modules():
                if isinstance(module, nn.Embedding):
                    module.weight.copy_(outer.embedding)
            for head in self.head:
                head.get_parameter("weight").copy_(outer.lm_head)

    def step(self, i: int, s: Tensor, cell: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        raise NotImplementedError

    def forward(self, states: Tensor, tokens: Tensor) -> Tensor:
        """Logits [n_predict, T, V].

        states [T, hidden]; tokens [T + n_predict - 1], each after the token of its state.
        """
        return torch.stack([head(s) for head, s in zip(self.head, self.outputs(states, tokens))])

    def outputs(self, states: Tensor, tokens: Tensor) -> list[Tensor]:
        """The recurrent state [T, inner] after every step; arguments as of `forward`."""
        count = len(states)
        s, cell = states, states.new_zeros(count, self.inner)
        if self.scale_input:
            s = rms_normalize(states, EPS) * 0.5**0.5
        outputs = []
        for i in range(self.n_predict):
            s, cell = self.step(i, s, cell, tokens[i : i + count])
            outputs.append(s)
        return outputs

    def loss(self, sample: Sample, outer: TargetWeights) -> Tensor:
        """Cross entropy with the text, summed over the steps (IBM's first stage).

        position    t     t+1     t+2     t+3
        states      f_t
        tokens            x_t+1   x_t+2   x_t+3
        step 0 reads f_t and x_t+1, and predicts x_t+2;  step 1 reads x_t+2 and predicts x_t+3;  …
        """
        tokens, count = sample.tokens, max(0, len(sample.tokens) - self.n_predict - 1)
        total = outer.embedding.new_zeros(())
        for i, s in enumerate(self.outputs(sample.states[FINAL][:count], tokens[1:])):
            rows = sample.places(i + 1, count)  # none for a text of too few tokens
            logits = self.head[i](s[rows]).float()
            total = total + mean_loss(F.cross_entropy(logits, tokens[i + 2 + rows], reduction="none"))
        return total

    def config(self) -> dict[str, Any]:
        return {
            "model_type": "mlp_speculator",
            "vocab_size": self.vocabulary,
            "n_predict": self.n_predict,
            "tie_weights": self.tie_weights,
            "scale_input": self.scale_input,
        }


class Network(Speculator):
    """IBM's, and Arctic's MLP."""

    def __init__(self, hidden: int, inner: int, vocabulary: int, *args: Any, **options: Any) -> None:
        super().__init__(hidden, inner, vocabulary, *args, **options)
        self.emb = self.each(lambda _: nn.Embedding(vocabulary, inner))
        self.proj = self.each(lambda i: nn.Linear(inner if i else hidden, inner, bias=False), apart=1)
        self.ln = self.each(lambda _: norm(inner))
        self.reset()

    def step(self, i: int, s: Tensor, cell: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        return F.gelu(self.ln[i](self.proj[i](s) + self.share * self.emb[i](tokens))), cell

    def config(self) -> dict[str, Any]:
        top_k = [4, 3, *[2] * self.n_predict][: self.n_predict]
        sizes = {"emb_dim": self.hidden, "inner_dim": self.inner}
        tree = {"top_k_tokens_per_head": top_k, "n_candidates": 5}
        return {"architectures": ["MLPSpeculatorPreTrainedModel"], **super().config(), **sizes, **tree}


class Arctic(Speculator):
    """Common to Arctic's recurrent variants.  layers: linears in a row, written "a.b" in the config."""

    method: str
    layers = 1

    def config(self) -> dict[str, Any]:
        size = ".".join([str(self.inner)] * self.layers)
        sizes = {"input_hidden_dim": self.hidden, "inner_dim": size, "emb_dim": size, "proj_dim": size}
        tree = {"top_k_tokens_per_head": [1] * self.n_predict, "n_candidates": self.n_predict}
        named = {"architectures": ["ArcticLSTMSpeculatorPreTrainedModel"], "method": self.method}
        return {**super().config(), **named, **sizes, **tree}


class Rnn(Arctic):
    method = RNN

    def __init__(
        self, hidden: int, inner: int, vocabulary: int, *args: Any, layers: int = 1, **options: Any
    ) -> None:
        super().__init__(hidden, inner, vocabulary, *args, **options)
        self.layers = layers

        def linear(inputs: int = inner) -> nn.Module:
            return nn.Linear(inputs, inner, bias=False)

        def row(first: nn.Module, *more: Callable[[], nn.Module]) -> nn.Sequential:
            return nn.Sequential(first, *(make() for _ in range(layers - 1) for make in more))

        normed, stored = partial(norm, inner), 1 if self.tie_weights else self.n_predict
        projected = [hidden, *[inner] * (max(stored, min(2, self.n_predict)) - 1)]
        tables = [nn.Embedding(vocabulary, inner) for _ in range(stored)]
        self.emb = nn.ModuleList(row(table, normed, nn.GELU, linear) for table in tables)
        self.proj = nn.ModuleList(row(linear(inputs), normed, nn.GELU, linear) for inputs in projected)
        self.ln = nn.ModuleList(row(normed(), nn.GELU, linear, normed) for _ in range(stored))
        self.reset()

    def step(self, i: int, s: Tensor, cell: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        one, two = (0, min(i, 1)) if self.tie_weights else (i, i)
        return F.gelu(self.ln[one](self.proj[two](s) + self.share * self.emb[one](tokens))), cell


class Lstm(Arctic):
    """All steps share their weights."""

    method = LSTM

    def __init__(
        self,
        hidden: int,
        inner: int,
        vocabulary: int,
        n_predict: int = 3,
        scale_input: bool = False,
        tie_lstm_embs: bool = False,
    ) -> None:
        super().__init__(hidden, inner, vocabulary, n_predict, True, scale_input)
        self.tie_lstm_embs = tie_lstm_embs
        shared = nn.ModuleList([nn.Embedding(vocabulary, inner)])
        for i, gate in enumerate(GATES):
            own = i > 0 and not tie_lstm_embs
            table = nn.ModuleList([nn.Embedding(vocabulary, inner)]) if own else shared
            projections = [nn.Linear(inputs, inner, bias=False) for inputs in (hidden, inner)]
            self.add_module(f"{gate}_emb", table)
            self.add_module(f"{gate}_proj", nn.ModuleList(projections))
        self.cell_ln, self.state_ln = nn.ModuleList([norm(inner)]), nn.ModuleList([norm(inner)])
        self.reset()

    def step(self, i: int, s: Tensor, cell: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        forget, enter, leave, new = (
            getattr(self, f"{gate}_proj")[min(i, 1)](s) + self.share * getattr(self, f"{gate}_emb")[0](tokens)
            for gate in GATES
        )
        cell = cell * forget.sigmoid() + F.gelu(self.cell_ln[0](new)) * enter.sigmoid()
        return F.gelu(self.state_ln[0](cell)) * leave.sigmoid(), cell

    def config(self) -> dict[str, Any]:
        return {**super().config(), "tie_lstm_embs": self.tie_lstm_embs}
