"""Published files of EAGLE-3 heads, the meaning of their configs, and export.

ours, as the reference (SafeAILab, SpecForge)       speculators, vLLM       SGLang
fc, norm, lm_head, d2t, t2d, embed_tokens           the same                the same
midlayer.…                                          layers.0.…              the same
layers.1.…, layers.2.… (ordinary layers)            the same                additional_layers.0.…, 1.…
fc_norm.0, …, input_norm (variants)                 the same                not supported
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from outrider.checkpoints.heads import Head
from outrider.core.step import FINAL
from outrider.errors import ConfigError, unknown
from outrider.heads.layouts import UNCHANGED, HeadFormat, Layout, speculators_config
from outrider.heads.outer import checked_taps

ARCHITECTURE = "LlamaForCausalLMEagle3"  # of SpecForge's and SGLang's files
TAPS = "eagle_aux_hidden_state_layer_ids"
FIRST = ("midlayer.{rest}", "midlayer.{rest}")
REST = (
    ("layers.0.{rest}", "midlayer.{rest}"),
    ("d2t", "d2t"),
    ("draft_id_to_target_id", "d2t"),
    ("{rest}.rotary_emb.inv_freq", None),
    ("rotary_emb.inv_freq", None),
    ("verifier_{rest}", None),
    ("layers.{i}.hidden_norm.weight", None),  # vLLM gives every layer a norm that only the first uses
    *UNCHANGED,
)
VLLM = Layout("speculators, vLLM", ("layers.0.hidden_norm.weight",), REST, ("model.",))
SGLANG = Layout(
    "SGLang",
    ("additional_layers.{i}.{rest}",),
    (
        ("additional_layers.{i}.hidden_norm.{rest}", "layers.{i+1}.input_layernorm.{rest}"),
        ("additional_layers.{i}.{rest}", "layers.{i+1}.{rest}"),
        FIRST,
        *REST,
    ),
    ("model.",),
)
REFERENCE = Layout("reference", ("midlayer.hidden_norm.weight",), (FIRST, *REST), ("model.",))


def is_parallel(head: Head) -> bool:
    """Whether a head under its published names is P-EAGLE's: all levels in one pass."""
    return any(name.split(".")[-1] == "mask_hidden" for name in head)


FORMAT = HeadFormat(
    (SGLANG, VLLM, REFERENCE),
    hidden=(("fc.weight", 1),),
    vocabulary=("lm_head.weight",),
    taps=(TAPS,),
    kinds=".*Eagle3.*|eagle3",
)


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


def exported(
    config: Mapping[str, Any], tensors: Mapping[str, Tensor], layout: str
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """A trained head for "vllm" (the format of speculators) or "sglang".

    Raises ConfigError for what SGLang's format cannot express.
    """
    if layout not in ("vllm", "sglang"):
        raise ConfigError(unknown("layout", layout, ("vllm", "sglang")))
    if layout == "vllm":
        return _speculators(config), {VLLM.published(name): tensor for name, tensor in tensors.items()}
    taps = [tap - 1 for tap in config[TAPS]]
    if min(taps) < 0:
        raise ConfigError(
            "SGLang cannot run a head that reads the input of layer 0: it counts the outputs of layers."
        )
    flat_config = {key: value for key, value in config.items() if key != TAPS}
    own = {"architectures": [ARCHITECTURE], "eagle_config": {TAPS: taps, "use_aux_hidden_state": True}}
    return {**flat_config, **own}, {SGLANG.published(name): tensor for name, tensor in tensors.items()}


def _speculators(config: Mapping[str, Any]) -> dict[str, Any]:
    own_keys = ("draft_vocab_size", "target_hidden_size", TAPS)
    layer = {key: value for key, value in config.items() if key not in (*own_keys, "architectures")}
    return {
        "architectures": ["Eagle3DraftModel"],
        "speculators_model_type": "eagle3",
        "speculators_version": "0.3.0",
        "transformer_layer_config": layer,
        "norm_before_residual": False,  # its default depends on the reader
        **{key: config[key] for key in own_keys},
        "speculators_config": speculators_config("eagle3", 5),
    }
