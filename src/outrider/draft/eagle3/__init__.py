"""EAGLE-3 (Li et al. 2025, arXiv 2503.01840): one layer on the inputs of three layers of the target.

It predicts x_t+2 from the states at t and the token x_t+1, over a vocabulary of its own.  Its output
stands for the next state, and so continues from its own drafts.  K/V: see heads/recurrent.py;
trees: heads/trees.py.

g = fc(states of the target), or its own last output
x = g + attend(qkv([norm(e); norm(g)]));  x += mlp(norm(x))      e: embedding of the next token, comes first
logits = lm_head(norm(x)) over the head's own tokens;            output: x, before `norm`
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from outrider.cache.pool import Pool
from outrider.checkpoints.heads import Head
from outrider.core.step import FINAL
from outrider.core.step_input import StepInput
from outrider.draft.eagle3.layouts import ARCHITECTURE, FORMAT, is_parallel, taps_of
from outrider.draft.eagle3.network import Network
from outrider.drafting.base import Drafter, Target
from outrider.errors import ModelError
from outrider.heads.base import random_head
from outrider.heads.layer import Pairs, Stack
from outrider.heads.layouts import numbers
from outrider.heads.outer import check_tap_options, own_embedding, own_lm_head
from outrider.heads.reader import Reader
from outrider.heads.recurrent import Net, Recurrent, RecurrentOptions
from outrider.heads.vocabulary import target_ids


class Packed(Net):
    """residual_normed: the first layer adds its output to the normed state.  output_normed: the recurrent
    state has passed `norm`.
    """

    def __init__(self, reader: Reader, target: Target, taps: tuple[int, ...]) -> None:
        super().__init__(reader, target)
        head, config = self.head, self.head.config
        self.taps, self.ids = taps, target_ids(head, target.vocabulary)
        self.hidden = h = head.shape("midlayer.self_attn.o_proj.weight")[0]
        self._read_states(self.model.spec.hidden)
        above = len(numbers(head, "layers.{i}.{rest}"))
        names = ["midlayer", *(f"layers.{i}" for i in range(1, 1 + above))]
        self.stack = Stack(reader, target, names, h, inputs=2 * h)
        token, state = (
            reader.vector(f"midlayer.{name}.weight", h) for name in ("input_layernorm", "hidden_norm")
        )
        self.pairs = Pairs(self.model, token, state, self.stack.sizes.eps, own_embedding(reader, target, h))
        forge = ARCHITECTURE in config.get("architectures", ())  # whose norm_output concerns only the lm_head
        self.residual_normed = bool(config.get("norm_before_residual"))
        output_normed = not forge and bool(config.get("norm_output"))
        head_normed = not forge or bool(config.get("norm_output", True))
        norm = reader.vector("norm.weight", h) if head_normed or output_normed else None
        self.norm, self.norm_output = norm if head_normed else None, norm if output_normed else None
        self.scale = float(config.get("logit_scale", 1.0))
        if self.ids is not None:
            head.shape("lm_head.weight")  # raises if it is missing
        self.lm_head = own_lm_head(reader, target, h, self.ids)

    def _read_states(self, width: int) -> None:
        """Pack what the states of the target, `width` wide, pass first."""
        reader, head, taps = self.reader, self.head, self.taps
        wide = len(taps) * width
        self.fc = None if taps == (FINAL,) else reader.linear("fc", self.hidden, wide)
        if self.fc is None and width != self.hidden:
            raise ModelError(
                f"{head.name!r} does not fit the target: it has no fc, a width of {self.hidden}, and "
                f"the target {width}."
            )
        normed = len(taps) if head.config.get("fc_norm") or "fc_norm.0.weight" in head else 0
        self.norm_taps = [reader.vector(f"fc_norm.{i}.weight", width) for i in range(normed)]
        before = bool(head.config.get("norm_before_fc")) or "input_norm.weight" in head
        self.norm_fc = reader.vector("input_norm.weight", wide) if before else None

    def from_states(self, states: Tensor) -> Tensor:
        run, eps, x = self.backend, self.stack.sizes.eps, states.contiguous()
        if self.norm_taps:
            parts = zip(x.chunk(len(self.norm_taps), dim=-1), self.norm_taps)
            x = torch.cat([run.rms_norm(part.contiguous(), norm, eps) for part, norm in parts], dim=-1)
        if self.norm_fc is not None:
            x = run.rms_norm(x, self.norm_fc, eps)
        return x if self.fc is None else run.linear(x, self.fc)

    def from_output(self, o: Tensor) -> Tensor:
        if self.norm_output is None:
            return o
        return self.backend.rms_norm(o.contiguous(), self.norm_output, self.stack.sizes.eps)

    def forward(self, step_input: StepInput, pool: Pool, g: Tensor) -> Tensor:
        u = self.pairs(step_input, g)
        x = u[:, self.hidden :].clone() if self.residual_normed else g
        return self.stack(x, step_input, pool, u)


class Eagle3(Recurrent):
    FORMAT = FORMAT
    demo: ClassVar = {"EAGLE-3": {"model": "builtin-eagle3", "tree": "chain", "num_speculative_tokens": 2}}

    @dataclass(frozen=True)
    class Options(RecurrentOptions):
        """eagle_aux_hidden_state_layer_ids: the layers whose inputs the head reads, numbered as in vLLM.

        tap_offset: added to the file's layer numbers (SpecForge and SGLang number outputs, offset 1).
        None for both: as the file's producer numbers them; check this first if acceptance is low.
        """

        eagle_aux_hidden_state_layer_ids: Sequence[int] | None = None
        tap_offset: int | None = None

        def __post_init__(self) -> None:
            super().__post_init__()
            check_tap_options(self)

    def network(self) -> Net:
        options, layers = self.options, self.target.decoder.spec.layers
        taps = taps_of(self.head, layers, options.eagle_aux_hidden_state_layer_ids, options.tap_offset)
        return Packed(self.reader, self.target, taps)

    @classmethod
    def claims(cls, head: Head) -> int:
        """2: the first layer has two norms and reads twice the width that it writes."""
        if is_parallel(head) or head.config.get("speculators_model_type", "eagle3") != "eagle3":
            return 0
        ours = FORMAT.renamed(head)
        norm, q, o = (
            f"midlayer.{name}.weight" for name in ("hidden_norm", "self_attn.q_proj", "self_attn.o_proj")
        )
        if norm in ours and q in ours and o in ours and ours.shape(q)[-1] == 2 * ours.shape(o)[0]:
            return 2
        return int(FORMAT.named_in(head.config))

    @classmethod
    def example(cls, target: Target) -> Drafter:
        """A random network over two thirds of the tokens."""
        return cls(cls.Options(), target, random_head(Network.like, target))
