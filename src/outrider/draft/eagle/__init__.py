"""EAGLE-1 and EAGLE-2 (arXiv 2401.15077, 2406.16858): one transformer layer continues the target's states.

    position of the target      t         t+1
    state, after the last norm  f_t                     the target emitted x_t+1 from it
    token                                 x_t+1
    g_t = fc [e(x_t+1); f_t],  o_t = layer(g_t)         o_t stands for f_t+1: the target's lm head gives x_t+2
    next level                            (o_t, draft of x_t+2)

The two differ in the tree only; "dynamic" is EAGLE-2's.  Positions and K/V: see heads/recurrent.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from outrider.cache.pool import Pool
from outrider.checkpoints.heads import Head
from outrider.core.step import FINAL
from outrider.core.step_input import StepInput
from outrider.draft.eagle.layouts import claims_of, translate
from outrider.draft.eagle.network import Network
from outrider.drafting.base import Drafter, Target
from outrider.errors import ModelError
from outrider.heads.layer import Block, Pairs, Sizes, rotary_table
from outrider.heads.reader import Reader
from outrider.heads.recurrent import Net, Recurrent, RecurrentOptions
from outrider.heads.vocabulary import listed_ids


class Packed:
    """The network on the target's kernels."""

    taps: tuple[int, ...] = (FINAL,)

    def __init__(self, reader: Reader, target: Target) -> None:
        head, model = reader.head, target.decoder
        if (wide := model.embed([0]).shape[1]) != model.spec.hidden:
            raise ModelError(
                f"{head.name!r} reads embeddings as wide as the target's states, {model.spec.hidden}, and "
                f"the target's are {wide}."
            )
        self.model, self.backend, hidden = model, reader.backend, model.spec.hidden
        self.fc = reader.linear("fc", hidden, 2 * hidden)
        count = sum(name.endswith(".self_attn.q_proj.weight") for name in head)
        self.sizes = Sizes.of(head, "layers.0", hidden)
        turn = rotary_table(head.config, self.sizes, target.max_len)
        norms = [self._norm(reader, f"layers.{i}.input_layernorm") for i in range(count)]
        self.blocks = [
            Block(reader, f"layers.{i}", self.sizes, hidden, turn, norm_in=norm)
            for i, norm in enumerate(norms)
        ]
        norm_token, norm_state, self.norm_out = (
            self._norm(reader, name) for name in ("norm_token", "norm_state", "norm_out")
        )
        self.pairs = Pairs(model, norm_token, norm_state, self.sizes.eps)
        self.ids = self.lm_head = None
        if "token_map" in head:  # a reduced vocabulary with an lm head of its own
            self.ids = listed_ids(head, "token_map", target.vocabulary)
            self.lm_head = reader.some("lm_head", self.ids, hidden)

    def _norm(self, reader: Reader, name: str) -> Tensor | None:
        name = f"{name}.weight"
        return reader.vector(name, self.model.spec.hidden) if name in reader.head else None

    @property
    def slot_bytes(self) -> int:
        return self.sizes.slot_bytes(len(self.blocks), self.model)

    def pool(self, slots: int) -> Pool:
        return self.sizes.pool(len(self.blocks), slots, self.model)

    def from_states(self, states: Tensor) -> Tensor:
        return states

    def from_output(self, o: Tensor) -> Tensor:
        return o

    def forward(self, step_input: StepInput, pool: Pool, g: Tensor) -> Tensor:
        x: Tensor = self.backend.linear(self.pairs(step_input, g), self.fc)
        for i, block in enumerate(self.blocks):
            x = block(x, step_input, pool, i)
        return x

    def logits(self, o: Tensor) -> Tensor:
        o = o if self.norm_out is None else self.backend.rms_norm(o, self.norm_out, self.sizes.eps)
        if self.lm_head is None:
            return self.model.head_logits(o)
        return self.backend.linear(o, self.lm_head).float()


class Eagle(Recurrent):
    demo: ClassVar = {"EAGLE": {"model": "builtin-eagle", "tree": "chain", "num_speculative_tokens": 2}}

    @dataclass(frozen=True)
    class Options(RecurrentOptions):
        """As of all recurrent heads; a published tree by name is EAGLE-1's."""

    @classmethod
    def claims(cls, head: Head) -> int:
        return claims_of(head)

    @classmethod
    def check(cls, head: Head) -> None:
        super().check(head)
        translate(head)

    @classmethod
    def example(cls, target: Target) -> Drafter:
        """A random head, and a wide and deep tree."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            network = Network.like(target)
        head = Head.of("example", network.config(), network.state_dict())
        return cls(cls.Options(nodes=24, top_k=4), target, head)

    def network(self) -> Net:
        self.head = translate(self.head)
        fc, hidden = self.head.shape("fc.weight"), self.hidden
        if fc != (hidden, 2 * hidden):
            raise ModelError(
                f"{self.head.name!r} does not fit the target: its fc is {fc}, and the target's hidden size "
                f"needs {(hidden, 2 * hidden)}."
            )
        return Packed(Reader(self.head, self.backend, self.reader.bits), self.target)
