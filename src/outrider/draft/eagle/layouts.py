"""EAGLE's published files.

    layout                         ours
    reference, .bin or safetensors fc.*, layers.0.*, embed_tokens.weight (a copy of the target's, not read)
    vLLM, converted                model.* or model.model.*, lm_head.weight (a copy); enorm, hnorm; token_map for a part of the tokens
    vLLM, as it reads              embedding_layernorm, hidden_states_layernorm (HASS with add_para_norm)
    speculators v0.1               fusion_fc.*, transformer.*, embedding_layernorm, pre_lm_head_layernorm

Whether fc has a bias the file says, never the config: the reference's has one unless the config says otherwise, SGLang's always, vLLM's
(which reads the reference's files) never.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor

from outrider.checkpoints.heads import Head
from outrider.errors import ConfigError, ModelError, unknown

RENAMED = (
    (r"^(?:model\.)+", ""),
    (r"^fusion_fc\.", "fc."),
    (r"^transformer\.", "layers.0."),
    (r"^(?:embedding_layernorm|enorm)\.", "norm_token."),
    (r"^(?:hidden_states_layernorm|hnorm)\.", "norm_state."),
    (r"^(?:pre_lm_head_layernorm|norm)\.", "norm_out."),
)
LINEARS = r"fc|layers\.\d+\.(self_attn\.[qkvo]_proj|mlp\.(gate|up|down)_proj)"
NORMS = r"norm_(token|state|out)|layers\.\d+\.(input_layernorm|post_attention_layernorm|self_attn\.[qk]_norm)"
KNOWN = re.compile(rf"({LINEARS})\.(weight|bias)|({NORMS}|lm_head)\.weight|token_map")
LAYOUTS = ("reference", "vllm", "sglang", "speculators")
NESTED = ("model", "transformer_layer_config")  # where configs hide what the layer is


def named(head: Head) -> Head:
    """Under our names, with a flat config."""
    inner = [part for key in NESTED if isinstance(part := head.config.get(key), Mapping)]
    config = dict(head.config)
    for part in inner:
        config.update(part)
    return replace(head.renamed(_name), config=config)


def _name(name: str) -> str | None:
    for pattern, ours in RENAMED:
        name = re.sub(pattern, ours, name)
    return None if name.startswith("embed_tokens.") or "rotary_emb" in name else name


def translate(head: Head) -> Head:
    """As `named`.  Raises ModelError where there are tensors whose meaning is not known here."""
    found = named(head)
    if strange := sorted(found.stored[name] for name in found if not KNOWN.fullmatch(name)):
        raise ModelError(
            f"{head.name!r} is another kind of head: only dense layers as Llama's and Qwen's are built; it has {', '.join(strange[:4])}."
        )
    return found


def claims_of(head: Head) -> int:
    """2: the layer reads a state, not a state beside a token, behind an fc of two inputs."""
    ours, q = named(head), "layers.0.self_attn.q_proj.weight"
    if "fc.weight" in ours and q in ours:
        hidden, wide = ours.shape("fc.weight")
        other = "hidden_norm.weight" in ours or any(
            "mtp." in name for name in head
        )  # a norm over the taps of a block-parallel head
        if wide == 2 * hidden and ours.shape(q)[1] == hidden and not other:
            return 2
    return int(
        head.config.get("model_type") == "eagle" or head.config.get("speculators_model_type") == "eagle"
    )


def exported(
    config: Mapping[str, Any], tensors: Mapping[str, Tensor], layout: str
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Config and tensors of a trained network as others read them.  Raises ConfigError where they would read something else."""
    if layout not in LAYOUTS:
        raise ConfigError(unknown("layout", layout, LAYOUTS))
    if layout == "vllm" and "fc.bias" in tensors:
        raise ConfigError(
            "vLLM reads no bias of fc, and would leave it out: train the head with bias=False, or write it for another."
        )
    if layout == "sglang":
        bias = {"fc.bias": tensors["fc.weight"].new_zeros(len(tensors["fc.weight"]))}
        return {**config, "architectures": ["LlamaForCausalLMEagle"], "bias": True}, {**bias, **tensors}
    if layout != "speculators":
        return dict(config), dict(tensors)
    renamed = {
        re.sub(r"^layers\.0\.", "transformer.", re.sub(r"^fc\.", "fusion_fc.", name)): tensor
        for name, tensor in tensors.items()
    }
    return {
        "speculators_model_type": "eagle", "speculators_version": "0.1.0", "architectures": ["EagleSpeculator"],
        "transformer_layer_architecture": "LlamaDecoderLayer", "transformer_layer_config": dict(config), "layernorms": False,
        "fusion_bias": "fc.bias" in tensors,
    }, {name: tensor for name, tensor in renamed.items() if not name.startswith(("embed_tokens", "lm_head"))}  # fmt: skip
