"""The MLP speculator's network, step by step, on the target's kernels.

sw = 0.5^(0.5 / n_predict), ew = sqrt((1 - sw²) d / 2)            n_predict of the file, not of the drafts
mlp     s' = GELU(norm(proj(s) + ew/sw · emb(token)))             the norm is an RMS norm with a shift
lstm    f, i, o, g = proj(s) + ew/sw · emb(token)
        c' = c σ(f) + GELU(norm(g)) σ(i);   s' = GELU(norm(c')) σ(o)
logits = head(s')
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from outrider.backends.base import Backend
from outrider.core.step_input import StepInput
from outrider.draft.mlp_speculator.layouts import GATES, KINDS, LSTM, SpeculatorLayout
from outrider.errors import ModelError
from outrider.heads.reader import Reader
from outrider.models.fallback.row_invariant import by_rows

EPS = 1e-6
State = tuple[Tensor, ...]  # recurrent state, [n, …] each


@dataclass(frozen=True)
class Norm:
    """GELU(x / rms(x) · weight + bias)."""

    weight: Tensor
    bias: Tensor

    @staticmethod
    def read(reader: Reader, name: str, size: int) -> Norm:
        bias = reader.vector(f"{name}.bias", size).to(reader.backend.activations)
        return Norm(reader.vector(f"{name}.weight", size), bias)

    def __call__(self, x: Tensor, run: Backend) -> Tensor:
        return by_rows(F.gelu, run.rms_norm(x, self.weight, EPS) + self.bias)


@dataclass(frozen=True)
class Step:
    """table: the embedding.  emb, proj, norm: modules in sequence.  share: weight of the token beside the
    state.
    """

    table: Any
    emb: Sequence[Any]
    proj: Sequence[Any]
    norm: Sequence[Any]
    head: Any
    share: float


class Speculator:
    """hidden, vocabulary: the target's."""

    def __init__(self, reader: Reader, layout: SpeculatorLayout, hidden: int) -> None:
        self.backend, self.steps = reader.backend, layout.steps
        self.reader = replace(reader, head=layout.head)
        self.outer = self.reader.outer
        scaled = layout.head.config.get("scale_input") is True
        self.scale = torch.full((hidden,), 0.5**0.5, device=self.backend.device) if scaled else None

    def begin(self, states: Tensor) -> State:
        """The initial state, of the target's states [n, hidden]."""
        return (states if self.scale is None else self.backend.rms_norm(states, self.scale, EPS),)

    def __call__(self, step: int, state: State, ids: Sequence[int]) -> tuple[State, Tensor]:
        """The state after tokens `ids`, and the logits float32 [n, V] of the next token."""
        raise NotImplementedError

    def _share(self, width: int) -> float:
        sw: float = 0.5 ** (0.5 / self.steps)
        return math.sqrt((1 - sw**2) * width / 2) / sw


def load(reader: Reader, layout: SpeculatorLayout, hidden: int, vocabulary: int) -> Speculator:
    return (Lstm if layout.method == LSTM else Mlp)(reader, layout, hidden, vocabulary)


class Mlp(Speculator):
    def __init__(self, reader: Reader, layout: SpeculatorLayout, hidden: int, vocabulary: int) -> None:
        super().__init__(reader, layout, hidden)
        # Modules that several steps share are packed once.
        modules, outer = lru_cache(None)(partial(_modules, self.reader)), lru_cache(None)(self.outer.linear)
        self.each: list[Step] = []
        width = hidden
        for i in range(layout.steps):
            emb, proj, ln, head = (f"{kind}.{layout.place(kind, i)}" for kind in KINDS)
            wide = layout.head.shape(f"{emb}.0.weight")[-1]
            table = outer(f"{emb}.0", vocabulary, wide)
            after, wide = modules(emb, wide, 1)
            projected, proj_width = modules(proj, width, 0)
            if proj_width != wide:
                raise ModelError(
                    f"{layout.head.name!r} adds {proj} of {proj_width} numbers to {emb} of {wide}: the two "
                    "must be alike."
                )
            normed, width = modules(ln, wide, 0)
            self.each.append(
                Step(table, after, projected, normed, outer(head, vocabulary, width), self._share(wide))
            )

    def __call__(self, step: int, state: State, ids: Sequence[int]) -> tuple[State, Tensor]:
        run, now = self.backend, self.each[step]
        z = self._through(run.embed(now.table, StepInput.of_ids(ids)), now.emb)
        s = self._through(self._through(state[0], now.proj) + now.share * z, now.norm)
        return (s,), run.linear(s, now.head).float()

    def _through(self, x: Tensor, modules: Sequence[Any]) -> Tensor:
        for module in modules:
            x = module(x, self.backend) if isinstance(module, Norm) else self.backend.linear(x, module)
        return x


def _modules(reader: Reader, at: str, width: int, first: int) -> tuple[list[Any], int]:
    """The modules at.first … for an input of this width, and the width of their output."""
    numbers = {
        int(name.split(".")[2])
        for name in reader.head
        if name.startswith(f"{at}.") and name.endswith(".weight")
    }
    modules: list[Any] = []
    for name in (f"{at}.{number}" for number in sorted(numbers) if number >= first):
        shape = reader.head.shape(f"{name}.weight")
        if len(shape) == 1:
            modules.append(Norm.read(reader, name, width))
        else:
            modules.append(reader.linear(name, shape[0], width))
            width = shape[0]
    return modules, width


class Lstm(Speculator):
    def __init__(self, reader: Reader, layout: SpeculatorLayout, hidden: int, vocabulary: int) -> None:
        super().__init__(reader, layout, hidden)
        head = layout.head
        self.width = width = head.shape("forget_emb.0.weight")[-1]
        tied = head.config.get("tie_lstm_embs", "input_emb.0.weight" not in head)
        self.tables = [
            self.outer.linear(f"{gate}_emb.0", vocabulary, width) for gate in (GATES[:1] if tied else GATES)
        ]
        self.projs = [
            self._gates(i, width, inputs) for i, inputs in enumerate((hidden, width)[: layout.steps])
        ]
        self.cell_norm, self.state_norm = (
            Norm.read(self.reader, f"{name}_ln.0", width) for name in ("cell", "state")
        )
        outer = lru_cache(None)(self.outer.linear)
        self.heads = [
            outer(f"head.{layout.place('head', i)}", vocabulary, width) for i in range(layout.steps)
        ]
        self.share = self._share(width)

    def _gates(self, i: int, width: int, inputs: int) -> Any:
        if f"projs.{i}.weight" in self.reader.head:
            return self.reader.linear(f"projs.{i}", 4 * width, inputs)
        return self.reader.fused([(f"{gate}_proj.{i}", width) for gate in GATES], inputs)

    def begin(self, states: Tensor) -> State:
        return *super().begin(states), states.new_zeros(len(states), self.width)

    def __call__(self, step: int, state: State, ids: Sequence[int]) -> tuple[State, Tensor]:
        run, (s, cell), step_input = self.backend, state, StepInput.of_ids(ids)
        z = torch.cat([run.embed(table, step_input) for table in self.tables], dim=-1)
        z = z if len(self.tables) == len(GATES) else z.repeat(1, len(GATES))
        gates = run.linear(s, self.projs[min(step, 1)]) + self.share * z
        forget, enter, leave = by_rows(torch.sigmoid, gates[:, : 3 * self.width].contiguous()).chunk(
            3, dim=-1
        )
        cell = cell * forget + self.cell_norm(gates[:, 3 * self.width :].contiguous(), run) * enter
        s = self.state_norm(cell, run) * leave
        return (s, cell), run.linear(s, self.heads[step]).float()
