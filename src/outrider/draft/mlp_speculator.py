"""IBM's MLP speculator (Wertheimer et al. 2024, arXiv 2404.19124), and Arctic's variants of it.

A small recurrent network with its own embeddings and heads, started from the state that gave the pending
token:

    position   … e-2     e-1 │  e      e+1        e: the first draft token
    target     f_e-2         │                    its last state
    token            x_e-1   │  d_e    d_e+1      x: emitted, d: draft
    step 0 reads f_e-2 and x_e-1, its logits give d_e;  step 1 reads the state of step 0 and d_e, and gives
    d_e+1;  …

sw = 0.5^(0.5 / n_predict), ew = sqrt((1 - sw²) d / 2)            n_predict of the file, not of the drafts
s' = GELU(norm(proj(s) + ew/sw · emb(token)))                     the norm is an RMS norm with a shift
logits = head(s')

Steps and trees: heads/speculators.py.

Published files.  Ours number modules in a row, whether there are several or one.

    IBM, Arctic MLP   emb.{i} proj.{i} ln.{i} head.{i}, with or without "speculator." in front
    Arctic sum_rnn    emb.{i}.{j} proj.{i}.{j} ln.{i}.{j} head.{i}: norms (each before a GELU) and linears

i is the step.  Where steps share their weights, the file holds them once or under all names.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from outrider.checkpoints.heads import Head
from outrider.core.step import FINAL
from outrider.drafting.base import Drafter, Target
from outrider.errors import ModelError
from outrider.heads.base import State, random_head
from outrider.heads.layouts import HeadFormat, Layout, numbers, unchanged
from outrider.heads.outer import Ids, embed
from outrider.heads.reader import Reader
from outrider.heads.sample import Sample, TargetWeights
from outrider.heads.speculators import (
    EPS,
    KINDS,
    PREFIX,
    Norm,
    SpeculatorDrafter,
    SpeculatorOptions,
    refused,
    steps_of,
    token_share,
)

LSTM = re.compile(r"(^|\.)(forget_|projs\.)")  # in names of another method's tensors
ROWS = (
    *((f"{kind}.{{i}}.{{kind}}", f"{kind}.{{i}}.0.{{kind}}") for kind in KINDS[:3]),
    *unchanged(*(f"{kind}.{{i}}.{{j}}.{{kind}}" for kind in KINDS[:3]), "head.{i}.weight"),
)


def _complete(head: Head) -> Head:
    steps_of(head)
    return head


FORMAT = HeadFormat(
    (
        Layout("Arctic sum_rnn", ("proj.0.0.weight",), ROWS, (PREFIX,)),
        Layout("IBM", ("proj.0.weight",), ROWS, (PREFIX,)),
    ),
    hidden=(("proj.0.0.weight", 1),),
    vocabulary=("head.0.weight",),
    numbered=("emb.{i}.{rest}",),
    kinds="mlp_speculator|mlp",
    refused=refused,
    finish=_complete,
)


class ShiftedNorm(nn.RMSNorm):
    """An RMS norm with a bias."""

    def __init__(self, size: int) -> None:
        super().__init__(size, EPS)
        self.bias = nn.Parameter(torch.zeros(size))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.bias


class Network(nn.Module):
    """Network for training, with the names and config of IBM's files.

    inner: width of the recurrent state.  tie_weights: all steps share their weights.  scale_input: the
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
        """State [T, inner] after each step.  states [T, hidden]; tokens [T + n_predict - 1] behind them."""
        s, outputs = states, []
        if self.scale_input:
            s = F.rms_norm(states, states.shape[-1:], eps=EPS) * 0.5**0.5
        for i in range(self.n_predict):
            embedded = self.emb[i](tokens[i : i + len(states)])
            s = F.gelu(self.ln[i](self.proj[i](s) + self.share * embedded))
            outputs.append(s)
        return outputs

    def loss(self, sample: Sample, outer: TargetWeights) -> Tensor:
        """Cross entropy with the text, summed over the steps: step i reads x_t+i+1, predicts x_t+i+2."""
        tokens, total = sample.tokens, outer.embedding.new_zeros(())
        following = F.pad(tokens[1:], (0, self.n_predict))
        for i, s in enumerate(self.outputs(sample.states[FINAL], following)):
            rows = sample.places(i + 1, max(0, len(tokens) - i - 2))
            total = total + sample.text_loss(self.head[i](s.index_select(0, rows)), i + 2 + rows)
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


class Step(NamedTuple):
    """Weights of a step.

    table: the embedding.  emb, proj, norm: modules in a row.  share: of the token beside the state.
    """

    table: Any
    emb: Sequence[Any]
    proj: Sequence[Any]
    norm: Sequence[Any]
    head: Any
    share: float


class MlpSpeculator(SpeculatorDrafter):
    FORMAT = FORMAT
    demo: ClassVar = {"MLP speculator": {"model": "builtin-mlp_speculator", "num_speculative_tokens": 3}}
    Options = SpeculatorOptions

    def __init__(self, options: Any, target: Target, head: Head | None = None) -> None:
        super().__init__(options, target, head)
        numbers_of = steps_of(self.head)
        count, vocabulary = len(numbers_of["emb"]), target.vocabulary
        self.steps: list[Step] = []
        modules, width = lru_cache(None)(partial(_modules, self.reader)), self.hidden
        for step in range(count):
            emb, proj, ln, out = (f"{kind}.{numbers_of[kind][step]}" for kind in KINDS)
            emb_width = self.head.shape(f"{emb}.0.weight")[-1]
            table = self.outer(f"{emb}.0", vocabulary, emb_width)
            after, emb_width = modules(emb, emb_width, 1)
            projected, proj_width = modules(proj, width, 0)
            if proj_width != emb_width:
                raise ModelError(
                    f"{self.head.name!r} adds {proj} of {proj_width} numbers to {emb} of {emb_width}: the "
                    "two must be alike."
                )
            normed, width = modules(ln, emb_width, 0)
            lm_head, share = self.outer(out, vocabulary, width), token_share(count, emb_width)
            self.steps.append(Step(table, after, projected, normed, lm_head, share))
        self.plan(count)

    @classmethod
    def claims(cls, head: Head) -> int:
        """0 for an LSTM."""
        return 0 if any(map(LSTM.search, head)) else super().claims(head)

    @classmethod
    def example(cls, target: Target) -> Drafter:
        options = cls.Options(top_k_tokens_per_head=[3, 2, 2], n_candidates=5)
        return cls(options, target, random_head(Network, target.decoder.spec.hidden, 32, target.vocabulary))

    def advance(self, level: int, state: State, tokens: Ids) -> tuple[State, Tensor]:
        step = self.steps[level]
        z = self._through(embed(self.target.decoder, tokens, step.table), step.emb)
        s = self._through(self._through(state[0], step.proj) + step.share * z, step.norm)
        return (s,), self.backend.linear(s, step.head).float()

    def _through(self, x: Tensor, modules: Sequence[Any]) -> Tensor:
        for module in modules:
            x = module(x, self.backend) if isinstance(module, Norm) else self.backend.linear(x, module)
        return x


def _modules(reader: Reader, at: str, width: int, first: int) -> tuple[list[Any], int]:
    """The modules at.first … for an input of this width, and the width of their output."""
    modules: list[Any] = []
    for j in sorted(numbers(reader.head, f"{at}.{{j}}.weight", field="j")):
        if j < first:
            continue
        size, *inputs = reader.head.shape(f"{at}.{j}.weight")
        read = partial(reader.linear, inputs=width) if inputs else partial(Norm.read, reader)
        modules.append(read(f"{at}.{j}", size if inputs else width))
        width = size
    return modules, width
