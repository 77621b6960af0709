"""Published files of EAGLE heads.

    layout                         names
    reference, .bin or safetensors fc.*, layers.0.*, embed_tokens.weight (a copy of the target's, not read)
    vLLM, converted                model.* or model.model.*, lm_head.weight (a copy), enorm, hnorm,
                                   token_map (a smaller vocabulary)
    vLLM, as it reads              embedding_layernorm, hidden_states_layernorm (HASS with add_para_norm)
    speculators v0.1               fusion_fc.*, transformer.*, embedding_layernorm, pre_lm_head_layernorm

The file, not the config, decides whether fc has a bias.  The reference's has one unless the config says
otherwise, SGLang's always. vLLM reads the reference's files without it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor

from outrider.checkpoints.heads import Head
from outrider.errors import ConfigError, ModelError, unknown
from outrider.heads.layouts import HeadFormat, Layout

NORMS = (
    ("embedding_layernorm.{rest}", "norm_token.{rest}"),
    ("enorm.{rest}", "norm_token.{rest}"),
    ("hidden_states_layernorm.{rest}", "norm_state.{rest}"),
    ("hnorm.{rest}", "norm_state.{rest}"),
    ("pre_lm_head_layernorm.{rest}", "norm_out.{rest}"),
    ("norm.{rest}", "norm_out.{rest}"),
)
UNREAD = (("{rest}.rotary_emb.inv_freq", None), ("rotary_emb.inv_freq", None))
UNCHANGED = (("{rest}", "{rest}"),)
SPECULATORS = Layout(
    "speculators",
    ("fusion_fc.weight",),
    (
        *UNREAD,
        ("fusion_fc.{kind}", "fc.{kind}"),
        ("transformer.{rest}", "layers.0.{rest}"),
        *NORMS,
        *UNCHANGED,
    ),
    ("model.",),
)
VLLM = Layout(
    "vLLM",
    ("model.{rest}", "embedding_layernorm.weight", "enorm.weight", "token_map"),
    (*UNREAD, *NORMS, *UNCHANGED),
    ("model.",),
)
REFERENCE = Layout("reference", ("fc.weight",), (*UNREAD, *NORMS, *UNCHANGED))
FORMAT = HeadFormat(
    (SPECULATORS, VLLM, REFERENCE),
    hidden=(("fc.weight", 0),),
    vocabulary=("lm_head.weight", "embed_tokens.weight"),
)
OURS = re.compile(
    r"(fc|layers\.\d+\.(self_attn\.[qkvo]_proj|mlp\.(gate|up|down)_proj))\.(weight|bias)|token_map|"
    r"(norm_(token|state|out)|lm_head|embed_tokens)\.weight|"
    r"layers\.\d+\.(input_layernorm|post_attention_layernorm|self_attn\.[qk]_norm)\.weight"
)
EXPORTED = ("reference", "vllm", "sglang", "speculators")
NESTED = ("model", "transformer_layer_config")  # keys under which configs describe the layer


def _renamed(head: Head) -> Head:
    """Under our names, with a flat config."""
    config = dict(head.config)
    for key in NESTED:
        if isinstance(inner := head.config.get(key), Mapping):
            config.update(inner)
    return replace(FORMAT.translate(head), config=config)


def translate(head: Head) -> Head:
    """The head under our names, with a flat config.

    Raises ModelError if it has tensors of unknown meaning.
    """
    ours = _renamed(head)
    if strange := sorted(ours.stored[name] for name in ours if not OURS.fullmatch(name)):
        raise ModelError(
            f"{head.name!r} is another kind of head: only dense layers as Llama's and Qwen's are supported; "
            f"it has {', '.join(strange[:4])}."
        )
    return ours


def claims_of(head: Head) -> int:
    """2: fc has two inputs, and the layer after it reads one state; 1: by its config; 0: not an EAGLE
    head."""
    ours, q = _renamed(head), "layers.0.self_attn.q_proj.weight"
    # A norm over the taps belongs to a block-parallel head.
    other = "hidden_norm.weight" in ours or any("mtp." in name for name in head)
    if "fc.weight" in ours and q in ours and not other:
        hidden, inputs = ours.shape("fc.weight")
        if inputs == 2 * hidden and ours.shape(q)[1] == hidden:
            return 2
    return int("eagle" in (head.config.get("model_type"), head.config.get("speculators_model_type")))


def exported(
    config: Mapping[str, Any], tensors: Mapping[str, Tensor], layout: str
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Config and tensors of a trained network for another engine.

    Raises ConfigError for what that engine would misread.
    """
    if layout not in EXPORTED:
        raise ConfigError(unknown("layout", layout, EXPORTED))
    if layout == "vllm" and "fc.bias" in tensors:
        raise ConfigError(
            "vLLM does not read the bias of fc: train the head with bias=False, or choose another layout."
        )
    if layout == "sglang":
        bias = {"fc.bias": tensors["fc.weight"].new_zeros(len(tensors["fc.weight"]))}
        return {**config, "architectures": ["LlamaForCausalLMEagle"], "bias": True}, {**bias, **tensors}
    if layout != "speculators":
        return dict(config), dict(tensors)
    outer = {
        "speculators_model_type": "eagle",
        "speculators_version": "0.1.0",
        "architectures": ["EagleSpeculator"],
        "transformer_layer_architecture": "LlamaDecoderLayer",
        "transformer_layer_config": dict(config),
        "layernorms": False,
        "fusion_bias": "fc.bias" in tensors,
    }
    own = [name for name in tensors if not name.startswith(("embed_tokens", "lm_head"))]
    return outer, {SPECULATORS.published(name): tensors[name] for name in own}
