"""Under which names EAGLE-3 heads are published, what their configs mean, and how ours are written for other engines.

Ours are the reference's (SafeAILab, SpecForge): `fc`, `midlayer.…`, `norm`, `lm_head`, `d2t`, `t2d`, `embed_tokens`, and `layers.1.…`,
`layers.2.…` for ordinary layers above the first.  The variants, `fc_norm.0`, … and `input_norm`, have one name everywhere.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from outrider.checkpoints.heads import Head
from outrider.core.types import FINAL
from outrider.errors import ConfigError, ModelError, unknown
from outrider.heads.recurrent import config_flag

SPECFORGE = "LlamaForCausalLMEagle3"  # the architecture of SpecForge's and SGLang's files
TAPS = "eagle_aux_hidden_state_layer_ids"
DROPPED = re.compile(
    r"verifier_|.*rotary_emb\.inv_freq$|layers\.[1-9]\d*\.hidden_norm\."
)  # vLLM gives every layer a norm that only the first uses


def named(name: str) -> str | None:
    """Our name of a published one: official, speculators', vLLM's with its prefix, SGLang's."""
    name = name.removeprefix("model.")
    if name == "draft_id_to_target_id":
        return "d2t"
    if above := re.match(r"additional_layers\.(\d+)\.(.+)", name):
        layer, rest = int(above[1]) + 1, above[2].replace("hidden_norm", "input_layernorm")
        return f"layers.{layer}.{rest}"
    if DROPPED.match(name):
        return None
    return re.sub(r"^layers\.0\.", "midlayer.", name)


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
    """Under our names.  Raises ModelError for what is no EAGLE-3 head, or one that cannot be run."""
    config, head = flat(head.config), head.renamed(named)
    if "mask_hidden" in head or config.get("speculators_model_type") == "peagle":
        raise ModelError(
            f"{head.name!r} is a P-EAGLE head (parallel drafting, mask_hidden), which is not supported: take an EAGLE-3 head."
        )
    return replace(head, config=config)


def claims_of(head: Head) -> int:
    """2 where the tensors are those of an EAGLE-3 head (the first layer has two norms and reads twice the width that it writes)."""
    ours, config = head.renamed(named), flat(head.config)
    names = [f"midlayer.{name}.weight" for name in ("hidden_norm", "self_attn.q_proj", "self_attn.o_proj")]
    if all(name in ours for name in names) and ours.shape(names[1])[-1] == 2 * ours.shape(names[2])[0]:
        return 2
    return int(
        config.get("speculators_model_type") == "eagle3"
        or any("Eagle3" in str(name) for name in config.get("architectures", ()))
    )


@dataclass(frozen=True)
class Facts:
    """taps: the target's states that `fc` reads.  residual_normed: the first layer adds to the normed state.  output_normed: what recurs
    went through `norm`; head_normed: what `lm_head` reads did.  scale: of the logits."""

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
        """head: `translate`; layers: of the target; given, offset: what the user says of the taps."""
        config = head.config
        forge = SPECFORGE in config.get(
            "architectures", ()
        )  # whose norm_output says whether there is a norm before the lm_head
        return Facts(
            hidden=head.shape("midlayer.self_attn.o_proj.weight")[0],
            taps=taps_of(head, layers, given, offset),
            layers=1 + len({match[1] for name in head if (match := re.match(r"layers\.(\d+)\.", name))}),
            eps=float(config.get("rms_norm_eps") or 1e-6),
            residual_normed=config_flag(config, "norm_before_residual", False),
            output_normed=not forge and config_flag(config, "norm_output", False),
            head_normed=not forge or config_flag(config, "norm_output", True),
            scale=float(config.get("logit_scale", 1.0)),
        )


def taps_of(
    head: Head, layers: int, given: Sequence[int] | None = None, offset: int | None = None
) -> tuple[int, ...]:
    """Which states of the target a head reads: j is what enters layer j.

    vLLM and speculators count so; in SpecForge's and SGLang's files i is what leaves layer i.  One key means both, so the producer decides
    unless the user does: `given` counts as vLLM does, `offset` is added to what the file says.
    """
    if given is not None:
        return _inside(head, given, layers)
    if not config_flag(head.config, "use_aux_hidden_state", True) and "fc.weight" not in head:
        return (FINAL,)
    listed = head.config.get(TAPS)
    if listed is None and offset is not None:
        raise ConfigError(
            f"tap_offset {offset} moves what a file lists, and {head.name!r} lists nothing: give {TAPS} instead."
        )
    if listed is None:
        return tuple(sorted(min(max(tap, 0), layers) for tap in (2, layers // 2, layers - 3)))
    if (
        not isinstance(listed, Sequence)
        or isinstance(listed, str)
        or not all(isinstance(tap, int) for tap in listed)
    ):
        raise ModelError(f"{TAPS} of {head.name!r} must be a list of layer numbers, got {listed!r}.")
    if offset is None:
        offset = int(
            "speculators_model_type" not in head.config and SPECFORGE in head.config.get("architectures", ())
        )
    return _inside(head, [tap + offset for tap in listed], layers)


def _inside(head: Head, taps: Sequence[int], layers: int) -> tuple[int, ...]:
    if not taps or not all(0 <= tap <= layers for tap in taps):
        raise ModelError(
            f"{head.name!r} reads what enters the layers {list(taps)}; the target has 0 … {layers} ({TAPS}, tap_offset)."
        )
    return tuple(taps)


# ---- for other engines


def exported(
    config: Mapping[str, Any], tensors: Mapping[str, Tensor], layout: str
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """A head under our names, for "vllm" (the format of speculators) or "sglang".  Raises ConfigError for what they cannot run."""
    if layout not in ("vllm", "sglang"):
        raise ConfigError(unknown("layout", layout, ("vllm", "sglang")))
    given = {name: tensor.detach().contiguous() for name, tensor in tensors.items()}
    return _speculators(dict(config), given) if layout == "vllm" else _sglang(dict(config), given)


def _speculators(
    config: dict[str, Any], tensors: dict[str, Tensor]
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    own = (
        "draft_vocab_size",
        "target_hidden_size",
        TAPS,
        "norm_before_residual",
        "norm_before_fc",
        "fc_norm",
        "norm_output",
    )
    layer = {key: value for key, value in config.items() if key not in (*own, "architectures")}
    proposal = {
        "proposal_type": "greedy",
        "speculative_tokens": 5,
        "verifier_accept_k": 1,
        "accept_tolerance": 0.0,
    }
    outer = {
        "architectures": ["Eagle3DraftModel"], "speculators_model_type": "eagle3", "speculators_version": "0.3.0",
        "transformer_layer_config": layer, **{key: config[key] for key in own if key in config},
        "speculators_config": {
            "algorithm": "eagle3", "default_proposal_method": "greedy", "proposal_methods": [proposal],
            "verifier": {"name_or_path": None, "architectures": []},
        },
    }  # fmt: skip
    outer.setdefault("norm_before_residual", False)  # what its absence means depends on who reads it
    return outer, {re.sub(r"^midlayer\.", "layers.0.", name): tensor for name, tensor in tensors.items()}


def _sglang(config: dict[str, Any], tensors: dict[str, Tensor]) -> tuple[dict[str, Any], dict[str, Tensor]]:
    flags = [
        name for name in ("norm_before_residual", "norm_before_fc", "norm_output") if config.pop(name, False)
    ]
    if flags or "input_norm.weight" in tensors:
        raise ConfigError(
            f"SGLang cannot run a head with {' and '.join(flags or ['input_norm'])}: export it for vllm."
        )
    taps = [tap - 1 for tap in config.pop(TAPS)]
    if min(taps) < 0:
        raise ConfigError(
            "SGLang cannot run a head that reads what enters layer 0: it counts what leaves a layer."
        )
    config |= {"architectures": [SPECFORGE], "eagle_config": {TAPS: taps, "use_aux_hidden_state": True}}

    def theirs(name: str) -> str:
        match = re.match(r"layers\.(\d+)\.(.+)", name)
        return (
            name
            if match is None
            else f"additional_layers.{int(match[1]) - 1}.{match[2].replace('input_layernorm', 'hidden_norm')}"
        )

    return config, {theirs(name): tensor for name, tensor in tensors.items()}
