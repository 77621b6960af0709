"""The packed network of EAGLE-3's and P-EAGLE's heads, and the states of the target that it reads.

g = fc(states of the target), or its own last output
x = g + attend(qkv([norm(e); norm(g)]));  x += mlp(norm(x))     e: embedding of the next token, comes first
logits = lm_head(norm(x)) over the head's own tokens;           output: x, before `norm`
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor

from outrider.cache.pool import Pool
from outrider.checkpoints.heads import Head
from outrider.core.step import FINAL
from outrider.core.step_input import StepInput
from outrider.core.validate import list_of, whole
from outrider.drafting.base import Target
from outrider.errors import ConfigError
from outrider.heads.base import LayerOptions
from outrider.heads.layer import Pairs, Stack
from outrider.heads.layouts import numbers
from outrider.heads.outer import checked_taps, own_embedding, own_lm_head
from outrider.heads.reader import Reader
from outrider.heads.recurrent_net import Net
from outrider.heads.vocabulary import target_ids

ARCHITECTURE = "LlamaForCausalLMEagle3"  # of SpecForge's and SGLang's files
TAPS = "eagle_aux_hidden_state_layer_ids"
LAYERS = list_of("layer numbers", whole())


@dataclass(frozen=True)
class TapOptions(LayerOptions):
    """eagle_aux_hidden_state_layer_ids: the layers whose inputs the head reads, numbered as in vLLM.

    tap_offset: added to the file's layer numbers (SpecForge and SGLang number outputs, offset 1).
    None for both: as the file's producer numbers them; check this first if acceptance is low.
    """

    eagle_aux_hidden_state_layer_ids: Annotated[Sequence[int], LAYERS] | None = None
    tap_offset: Annotated[int, whole()] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if None not in (self.eagle_aux_hidden_state_layer_ids, self.tap_offset):
            raise ConfigError(
                f"tap_offset moves what the file says, and {TAPS} replaces it: leave one of them out."
            )


class TapNet(Net):
    """Network over several states of the target.

    residual_normed: the first layer adds its output to the normed state.
    """

    def __init__(self, reader: Reader, target: Target, options: TapOptions) -> None:
        super().__init__(reader, target)
        head, config, taps = self.head, self.head.config, options.eagle_aux_hidden_state_layer_ids
        self.taps = taps_of(head, self.model.spec.layers, taps, options.tap_offset)
        self.ids = target_ids(head, target.vocabulary)
        self.hidden = hidden = head.shape("midlayer.self_attn.o_proj.weight")[0]
        self._read_states(self.model.spec.hidden)
        above = len(numbers(head, "layers.{i}.{rest}"))
        names = ["midlayer", *(f"layers.{i}" for i in range(1, 1 + above))]
        self.stack = Stack(reader, target, names, hidden, first_inputs=2 * hidden)
        norm_token = reader.vector("midlayer.input_layernorm.weight", hidden)
        norm_state = reader.vector("midlayer.hidden_norm.weight", hidden)
        embedding = own_embedding(reader, target, hidden)
        self.pairs = Pairs(self.model, norm_token, norm_state, self.stack.eps, embedding)
        self.residual_normed = bool(config.get("norm_before_residual"))
        self._read_output_norm()
        self.scale = float(config.get("logit_scale", 1.0))
        if self.ids is not None:
            head.shape("lm_head.weight")  # raises if it is missing
        self.lm_head = own_lm_head(reader, target, hidden, self.ids)

    def _read_output_norm(self) -> None:
        """The norm before the lm_head, the same for outputs that take the place of states, or none.

        norm_output concerns outputs; in SpecForge's and SGLang's files it concerns the lm_head only.
        """
        config = self.head.config
        if ARCHITECTURE in config.get("architectures", ()):
            before_head, of_outputs = bool(config.get("norm_output", True)), False
        else:
            before_head, of_outputs = True, bool(config.get("norm_output"))
        norm = self.reader.vector("norm.weight", self.hidden) if before_head else None
        self.norm, self.norm_output = norm, norm if of_outputs else None

    def _read_states(self, width: int) -> None:
        """Pack what the states of the target, `width` wide, pass first."""
        reader, head, taps = self.reader, self.head, self.taps
        wide = len(taps) * width
        self.fc = None if taps == (FINAL,) else reader.linear("fc", self.hidden, wide)
        if self.fc is None and width != self.hidden:
            raise head.misfit(f"it has no fc, a width of {self.hidden}, and the target {width}")
        normed = len(taps) if head.config.get("fc_norm") or "fc_norm.0.weight" in head else 0
        self.norm_taps = [reader.vector(f"fc_norm.{i}.weight", width) for i in range(normed)]
        before = bool(head.config.get("norm_before_fc")) or "input_norm.weight" in head
        self.norm_fc = reader.vector("input_norm.weight", wide) if before else None

    def from_states(self, states: Tensor) -> Tensor:
        run, eps, x = self.backend, self.stack.eps, states.contiguous()
        if self.norm_taps:
            parts = zip(x.chunk(len(self.norm_taps), dim=-1), self.norm_taps)
            x = torch.cat([run.rms_norm(part.contiguous(), norm, eps) for part, norm in parts], dim=-1)
        if self.norm_fc is not None:
            x = run.rms_norm(x, self.norm_fc, eps)
        return x if self.fc is None else run.linear(x, self.fc)

    def from_output(self, o: Tensor) -> Tensor:
        if self.norm_output is None:
            return o
        return self.backend.rms_norm(o.contiguous(), self.norm_output, self.stack.eps)

    def forward(self, step_input: StepInput, pool: Pool, g: Tensor) -> Tensor:
        u = self.pairs(step_input, g)
        x = u[:, self.hidden :].clone() if self.residual_normed else g
        return self.stack(x, step_input, pool, u)


def is_parallel(head: Head) -> bool:
    """Whether a head under its published names is P-EAGLE's: all levels in one pass."""
    return any(name.split(".")[-1] == "mask_hidden" for name in head)


def taps_of(
    head: Head, layers: int, given: Sequence[int] | None = None, offset: int | None = None
) -> tuple[int, ...]:
    """The states of the target that a head reads: tap j is the input of layer j.

    vLLM and speculators count in this way.  In SpecForge's and SGLang's files i is the output of layer i.
    Both use the same key, so the file's producer decides, unless the user does.

    layers: of the target.  given: the taps, counted as vLLM does.  offset: added to the file's numbers.
    """
    if given is not None:
        return checked_taps(head, given, 0, layers, TAPS)
    if head.config.get("use_aux_hidden_state") is False and "fc.weight" not in head:
        return (FINAL,)
    listed = head.config.get(TAPS)
    if listed is None and offset is not None:
        raise ConfigError(
            f"tap_offset {offset} applies to layer numbers in the file, "
            f"and {head.name!r} lists none: give {TAPS}."
        )
    if listed is None:
        return default_taps(layers)
    forge = ARCHITECTURE in head.config.get("architectures", ())
    own = int(forge and "speculators_model_type" not in head.config)
    return checked_taps(head, listed, own if offset is None else offset, layers, TAPS)


def default_taps(layers: int) -> tuple[int, ...]:
    """The published taps of a target with so many layers."""
    return tuple(sorted(min(max(tap, 0), layers) for tap in (2, layers // 2, layers - 3)))
