"""Published files of EAGLE-3 heads, the meaning of their configs, and export.

ours, as the reference (SafeAILab, SpecForge)       speculators, vLLM       SGLang
fc, norm, lm_head, d2t, t2d, embed_tokens           the same                the same
midlayer.…                                          layers.0.…              the same
layers.1.…, layers.2.… (ordinary layers)            the same                additional_layers.0.…, 1.…
fc_norm.0, …, input_norm (variants)                 the same                not supported
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from outrider.checkpoints.heads import Head
from outrider.core.step import FINAL
from outrider.errors import ConfigError, ModelError, unknown
from outrider.heads.layouts import HeadFormat, Layout, parse
from outrider.heads.recurrent import config_flag

ARCHITECTURE = "LlamaForCausalLMEagle3"  # of SpecForge's and SGLang's files
TAPS = "eagle_aux_hidden_state_layer_ids"
DROPPED = (
    ("{rest}.rotary_emb.inv_freq", None),
    ("rotary_emb.inv_freq", None),
    ("verifier_{rest}", None),
    ("layers.{i}.hidden_norm.weight", None),  # vLLM gives every layer a norm that only the first uses
)
REST = (("d2t", "d2t"), ("draft_id_to_target_id", "d2t"), *DROPPED, ("{rest}", "{rest}"))
FIRST = ("midlayer.{rest}", "midlayer.{rest}")
FIRST_NUMBERED = ("layers.0.{rest}", "midlayer.{rest}")
VLLM = Layout("speculators, vLLM", ("layers.0.hidden_norm.weight",), (FIRST_NUMBERED, *REST), ("model.",))
SGLANG = Layout(
    "SGLang",
    ("additional_layers.{i}.{rest}",),
    (
        ("additional_layers.{i}.hidden_norm.{rest}", "layers.{i+1}.input_layernorm.{rest}"),
        ("additional_layers.{i}.{rest}", "layers.{i+1}.{rest}"),
        FIRST,
        FIRST_NUMBERED,
        *REST,
    ),
    ("model.",),
)
REFERENCE = Layout("reference", ("midlayer.hidden_norm.weight",), (FIRST, FIRST_NUMBERED, *REST), ("model.",))


def _tap_count(head: Head) -> int:
    """The number of the target's states that `fc` reads: three unless the config lists them."""
    listed = flat(head.config).get(TAPS)
    return len(listed) if isinstance(listed, list) else 3


FORMAT = HeadFormat(
    (SGLANG, VLLM, REFERENCE), hidden=(("fc.weight", 1),), vocabulary=("lm_head.weight",), taps=_tap_count
)


def flat(config: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of one layer's config beside the head's own, wherever a file nests them."""
    outer = {key: value for key, value in config.items() if value is not None}
    inner: Mapping[str, Any] = next(
        (outer[key] for key in ("transformer_layer_config", "model") if isinstance(outer.get(key), Mapping)),
        {},
    )
    both = {**inner, **outer}
    eagle = both.get("eagle_config")
    return {**eagle, **both} if isinstance(eagle, Mapping) else both


def translate(head: Head) -> Head:
    """The head under our names, with a flat config.

    Raises ModelError for a kind of head that is not supported.
    """
    ours, config = FORMAT.translate(head), flat(head.config)
    if "mask_hidden" in ours or config.get("speculators_model_type") == "peagle":
        raise ModelError(
            f"{head.name!r} is a P-EAGLE head (parallel drafting, mask_hidden), which is not supported: "
            "take an EAGLE-3 head."
        )
    return replace(ours, config=config)


def claims_of(head: Head) -> int:
    """2: the first layer has two norms and reads twice the width that it writes; 1: by its config; 0: not
    an EAGLE-3 head."""
    ours, config = FORMAT.translate(head), flat(head.config)
    norm, q, o = (
        f"midlayer.{name}.weight" for name in ("hidden_norm", "self_attn.q_proj", "self_attn.o_proj")
    )
    if norm in ours and q in ours and o in ours and ours.shape(q)[-1] == 2 * ours.shape(o)[0]:
        return 2
    named = any("Eagle3" in str(name) for name in config.get("architectures", ()))
    return int(named or config.get("speculators_model_type") == "eagle3")


@dataclass(frozen=True)
class Facts:
    """What a head computes, by its tensors and config.

    taps: the target's states that `fc` reads.
    residual_normed: the first layer adds its output to the normed state.
    output_normed: the recurrent state has passed `norm`.
    head_normed: the input of `lm_head` has passed `norm`.
    scale: factor of the logits.
    """

    hidden: int
    taps: tuple[int, ...]
    layers: int
    eps: float
    residual_normed: bool
    output_normed: bool
    head_normed: bool
    scale: float

    @staticmethod
    def of(head: Head, layers: int, given: Sequence[int] | None, offset: int | None) -> Facts:
        """head: as `translate` returns it.  layers: of the target.  given, offset: as in `taps_of`."""
        config = head.config
        forge = ARCHITECTURE in config.get("architectures", ())  # whose norm_output concerns only the lm_head
        above = {values["i"] for name in head if (values := parse("layers.{i}.{rest}", name))}
        return Facts(
            hidden=head.shape("midlayer.self_attn.o_proj.weight")[0],
            taps=taps_of(head, layers, given, offset),
            layers=1 + len(above),
            eps=float(config.get("rms_norm_eps") or 1e-6),
            residual_normed=config_flag(config, "norm_before_residual", False),
            output_normed=not forge and config_flag(config, "norm_output", False),
            head_normed=not forge or config_flag(config, "norm_output", True),
            scale=float(config.get("logit_scale", 1.0)),
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
        return _inside(head, given, layers)
    if not config_flag(head.config, "use_aux_hidden_state", True) and "fc.weight" not in head:
        return (FINAL,)
    listed = head.config.get(TAPS)
    if listed is None and offset is not None:
        raise ConfigError(
            f"tap_offset {offset} applies to layer numbers in the file, "
            f"and {head.name!r} lists none: give {TAPS}."
        )
    if listed is None:
        return tuple(sorted(min(max(tap, 0), layers) for tap in (2, layers // 2, layers - 3)))
    numbers = isinstance(listed, Sequence) and not isinstance(listed, str)
    if not numbers or not all(isinstance(tap, int) for tap in listed):
        raise ModelError(f"{TAPS} of {head.name!r} must be a list of layer numbers, got {listed!r}.")
    if offset is None:
        forge = ARCHITECTURE in head.config.get("architectures", ())
        offset = int(forge and "speculators_model_type" not in head.config)
    return _inside(head, [tap + offset for tap in listed], layers)


def _inside(head: Head, taps: Sequence[int], layers: int) -> tuple[int, ...]:
    if not taps or not all(0 <= tap <= layers for tap in taps):
        raise ModelError(
            f"{head.name!r} reads the inputs of the layers {list(taps)}; the target has 0 … {layers} "
            f"({TAPS}, tap_offset)."
        )
    return tuple(taps)


# ---- export

OWN_KEYS = (
    "draft_vocab_size", "target_hidden_size", TAPS, "norm_before_residual", "norm_before_fc", "fc_norm",
    "norm_output",
)  # fmt: skip


def exported(
    config: Mapping[str, Any], tensors: Mapping[str, Tensor], layout: str
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """A head under our names, for "vllm" (the format of speculators) or "sglang".

    Raises ConfigError for unsupported variants.
    """
    if layout not in ("vllm", "sglang"):
        raise ConfigError(unknown("layout", layout, ("vllm", "sglang")))
    stored = {name: tensor.detach().contiguous() for name, tensor in tensors.items()}
    if layout == "vllm":
        return _speculators(config), {VLLM.published(name): tensor for name, tensor in stored.items()}
    if "input_norm.weight" in stored:
        raise ConfigError("SGLang cannot run a head with input_norm: export it for vllm.")
    return _sglang(dict(config)), {SGLANG.published(name): tensor for name, tensor in stored.items()}


def _speculators(config: Mapping[str, Any]) -> dict[str, Any]:
    proposal = {
        "proposal_type": "greedy",
        "speculative_tokens": 5,
        "verifier_accept_k": 1,
        "accept_tolerance": 0.0,
    }
    return {
        "architectures": ["Eagle3DraftModel"],
        "speculators_model_type": "eagle3",
        "speculators_version": "0.3.0",
        "transformer_layer_config": {
            key: value for key, value in config.items() if key not in (*OWN_KEYS, "architectures")
        },
        "norm_before_residual": False,  # its default depends on the reader
        **{key: config[key] for key in OWN_KEYS if key in config},
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [proposal],
            "verifier": {"name_or_path": None, "architectures": []},
        },
    }


def _sglang(config: dict[str, Any]) -> dict[str, Any]:
    flags = [
        flag for flag in ("norm_before_residual", "norm_before_fc", "norm_output") if config.pop(flag, False)
    ]
    if flags:
        raise ConfigError(f"SGLang cannot run a head with {' and '.join(flags)}: export it for vllm.")
    taps = [tap - 1 for tap in config.pop(TAPS)]
    if min(taps) < 0:
        raise ConfigError(
            "SGLang cannot run a head that reads the input of layer 0: it counts the outputs of layers."
        )
    eagle_config = {TAPS: taps, "use_aux_hidden_state": True}
    return {**config, "architectures": [ARCHITECTURE], "eagle_config": eagle_config}
