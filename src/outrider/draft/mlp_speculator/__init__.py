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
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache, partial
from typing import Any, ClassVar, NamedTuple

from torch import Tensor

from outrider.checkpoints.heads import Head
from outrider.draft.mlp_speculator.layouts import FORMAT, LSTM
from outrider.draft.mlp_speculator.network import Network
from outrider.drafting.base import Drafter, Target
from outrider.errors import ModelError
from outrider.heads.base import State, random_head
from outrider.heads.layouts import numbers
from outrider.heads.outer import embed
from outrider.heads.reader import Reader
from outrider.heads.speculators import (
    KINDS,
    Norm,
    SpeculatorDrafter,
    SpeculatorOptions,
    steps_of,
    token_share,
)


class Step(NamedTuple):
    """table: the embedding.  emb, proj, norm: modules in a row.  share: of the token beside the state."""

    table: Any
    emb: Sequence[Any]
    proj: Sequence[Any]
    norm: Sequence[Any]
    head: Any
    share: float


class MlpSpeculator(SpeculatorDrafter):
    FORMAT = FORMAT
    demo: ClassVar = {"MLP speculator": {"model": "builtin-mlp_speculator", "num_speculative_tokens": 2}}

    Options = SpeculatorOptions

    def __init__(self, options: Any, target: Target, head: Head | None = None) -> None:
        super().__init__(options, target, head)
        steps = steps_of(self.head)
        self.steps: list[Step] = []
        modules, width = lru_cache(None)(partial(_modules, self.reader)), self.hidden
        for places in zip(*(steps[kind] for kind in KINDS)):
            emb, proj, ln, out = (f"{kind}.{place}" for kind, place in zip(KINDS, places))
            wide = self.head.shape(f"{emb}.0.weight")[-1]
            table = self.outer(f"{emb}.0", target.vocabulary, wide)
            after, wide = modules(emb, wide, 1)
            projected, proj_width = modules(proj, width, 0)
            if proj_width != wide:
                raise ModelError(
                    f"{self.head.name!r} adds {proj} of {proj_width} numbers to {emb} of {wide}: the two "
                    "must be alike."
                )
            normed, width = modules(ln, wide, 0)
            lm_head, share = self.outer(out, target.vocabulary, width), token_share(len(steps["emb"]), wide)
            self.steps.append(Step(table, after, projected, normed, lm_head, share))
        self.plan(len(self.steps))

    @classmethod
    def claims(cls, head: Head) -> int:
        """0 for an LSTM."""
        return 0 if any(map(LSTM.search, head)) else super().claims(head)

    @classmethod
    def example(cls, target: Target) -> Drafter:
        options = cls.Options(top_k_tokens_per_head=[3, 2, 2], n_candidates=5)
        return cls(options, target, random_head(Network, target.decoder.spec.hidden, 32, target.vocabulary))

    def advance(self, level: int, state: State, tokens: Sequence[int]) -> tuple[State, Tensor]:
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
