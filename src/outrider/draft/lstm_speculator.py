"""Arctic's LSTM speculator: an MLP speculator (IBM's, arXiv 2404.19124) whose recurrence is an LSTM's.

    f, i, o, g = proj(s) + ew/sw · emb(token)         ew, sw: see draft/mlp_speculator
    c' = c σ(f) + GELU(norm(g)) σ(i);   s' = GELU(norm(c')) σ(o);   logits = head(s')

Published names:

    forget_emb.0 input_emb.0 output_emb.0 cell_emb.0, forget_proj.{0,1} … cell_proj.{0,1}, cell_ln.0
    state_ln.0 head.{i}; or projs.{0,1}, the four side by side, as ArcticInference runs them

i is the step.  All steps but the first share the recurrence.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from outrider.checkpoints.heads import Head
from outrider.drafting.base import Drafter, Target
from outrider.heads.base import State
from outrider.heads.layouts import HeadFormat, Layout, unchanged
from outrider.heads.outer import Ids, embed
from outrider.heads.speculators import (
    PREFIX,
    Norm,
    SpeculatorDrafter,
    SpeculatorOptions,
    refused,
    steps_of,
    token_share,
)
from outrider.models.rowwise import by_rows

GATES = ("forget", "input", "output", "cell")  # side by side in this order
ROWS = unchanged(
    *(f"{gate}_{part}.{{i}}.weight" for gate in GATES for part in ("emb", "proj")),
    *("projs.{i}.weight", "cell_ln.0.{kind}", "state_ln.0.{kind}", "head.{i}.weight"),
)


def _steps(head: Head) -> list[int]:
    """The number of the lm_head of every step."""
    return steps_of(head, ("head",), shared=True)["head"]


def _complete(head: Head) -> Head:
    _steps(head)
    return head


class LstmSpeculator(SpeculatorDrafter):
    FORMAT = HeadFormat(
        (Layout("Arctic sum_lstm", ("projs.0.weight", "forget_proj.0.weight"), ROWS, (PREFIX,)),),
        hidden=(("projs.0.weight", 1), ("forget_proj.0.weight", 1)),
        vocabulary=("head.0.weight",),
        numbered=("head.{i}.weight",),
        kinds="ArcticLSTM.*",
        refused=refused,
        finish=_complete,
    )
    Options = SpeculatorOptions

    def __init__(self, options: Any, target: Target, head: Head | None = None) -> None:
        super().__init__(options, target, head)
        head, vocabulary = self.head, target.vocabulary
        self.width = width = head.shape("forget_emb.0.weight")[-1]
        tied = head.config.get("tie_lstm_embs", "input_emb.0.weight" not in head)
        gates = GATES[:1] if tied else GATES
        self.tables = [self.outer(f"{gate}_emb.0", vocabulary, width) for gate in gates]
        steps = _steps(head)
        self.projs = [self._gates(i, size) for i, size in enumerate((self.hidden, width)[: len(steps)])]
        self.norms = [Norm.read(self.reader, f"{name}_ln.0", width) for name in ("cell", "state")]
        self.lm_heads = [self.outer(f"head.{i}", vocabulary, width) for i in steps]
        self.share = token_share(len(steps), width)
        self.plan(len(steps))

    def _gates(self, i: int, inputs: int) -> Any:
        if f"projs.{i}.weight" in self.head:
            return self.reader.linear(f"projs.{i}", 4 * self.width, inputs)
        return self.reader.fused([(f"{gate}_proj.{i}", self.width) for gate in GATES], inputs)

    @classmethod
    def example(cls, target: Target) -> Drafter:
        """Random gates over one embedding, and a tree."""
        width = 32
        shapes = dict.fromkeys(("forget_emb.0.weight", "head.0.weight"), (target.vocabulary, width))
        inputs = {"projs.0.weight": target.decoder.spec.hidden, "projs.1.weight": width}
        shapes |= {name: (4 * width, size) for name, size in inputs.items()}
        random = torch.Generator().manual_seed(0)
        tensors = {name: torch.randn(shape, generator=random) * 0.1 for name, shape in shapes.items()}
        for name in ("cell_ln.0", "state_ln.0"):
            tensors |= {f"{name}.weight": torch.ones(width), f"{name}.bias": torch.zeros(width)}
        options = cls.Options(top_k_tokens_per_head=[3, 2, 2], n_candidates=5)
        return cls(options, target, Head.of("example", {"n_predict": 3}, tensors))

    def begin(self, states: Tensor) -> State:
        return *super().begin(states), states.new_zeros(len(states), self.width)

    def advance(self, level: int, state: State, tokens: Ids) -> tuple[State, Tensor]:
        run, (s, cell), (cell_norm, state_norm) = self.backend, state, self.norms
        z = torch.cat([embed(self.target.decoder, tokens, table) for table in self.tables], dim=-1)
        z = z if len(self.tables) == len(GATES) else z.repeat(1, len(GATES))
        gates = run.linear(s, self.projs[min(level, 1)]) + self.share * z
        opened, new = gates[:, : 3 * self.width].contiguous(), gates[:, 3 * self.width :].contiguous()
        forget, enter, leave = by_rows(torch.sigmoid, opened).chunk(3, dim=-1)
        cell = cell * forget + cell_norm(new, run) * enter
        s = state_norm(cell, run) * leave
        return (s, cell), run.linear(s, self.lm_heads[level]).float()
