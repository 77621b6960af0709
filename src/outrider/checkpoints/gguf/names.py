"""Architectures and tensor names of GGUF files, and the names of the same tensors in a checkpoint folder."""

from __future__ import annotations

import re
from pathlib import Path

from outrider.errors import ModelError

FAMILIES = {
    "llama": "Llama", "qwen2": "Qwen2", "qwen3": "Qwen3", "qwen3moe": "Qwen3Moe", "gemma": "Gemma",
    "gemma2": "Gemma2", "gemma3": "Gemma3", "gpt-oss": "GptOss", "qwen3next": "Qwen3Next",
    "qwen35": "Qwen3_5", "qwen35moe": "Qwen3_5Moe",
}  # fmt: skip
MODEL_TENSORS = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
BLOCK_TENSORS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.gate_proj",  # of all experts of a layer, [experts, outputs, inputs]
    "ffn_up_exps": "mlp.experts.up_proj",
    "ffn_down_exps": "mlp.experts.down_proj",
}
OUTPUT_NORMS = {  # where the outputs of attention and MLP are normalized, too
    "ffn_norm": "pre_feedforward_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
SINKS = {"post_attention_norm": "post_attention_layernorm", "attn_sinks": "self_attn.sinks"}
DELTA = {
    "post_attention_norm": "post_attention_layernorm",
    "attn_qkv": "linear_attn.in_proj_qkv",
    "attn_gate": "linear_attn.in_proj_z",
    "ssm_in": "linear_attn.in_proj_qkvz",  # in older files of Qwen3-Next, by head of keys
    "ssm_alpha": "linear_attn.in_proj_a",
    "ssm_beta": "linear_attn.in_proj_b",
    "ssm_ba": "linear_attn.in_proj_ba",
    "ssm_conv1d": "linear_attn.conv1d",
    "ssm_dt": "linear_attn.dt_bias",
    "ssm_a": "linear_attn.A",  # -exp(A_log)
    "ssm_norm": "linear_attn.norm",
    "ssm_out": "linear_attn.out_proj",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
}
HYBRIDS = ("qwen35", "qwen35moe", "qwen3next")  # architectures with gated delta rules
OWN_TENSORS = {"gemma2": OUTPUT_NORMS, "gemma3": OUTPUT_NORMS, "gpt-oss": SINKS}  # of an architecture
OWN_TENSORS |= dict.fromkeys(HYBRIDS, DELTA)
WHOLE_NAMES = ("attn_sinks", "ssm_dt", "ssm_a")  # of tensors that have no suffix in a checkpoint
ROPE_FACTORS = "rope_freqs.weight"  # one factor per frequency; no counterpart in a safetensors checkpoint


def family_of(architecture: str, path: Path) -> str:
    """The family's name in transformers.  Raises ModelError for an architecture that is not supported."""
    if architecture not in FAMILIES:
        raise ModelError(
            f"{path} holds architecture {architecture!r}, which is not supported.  "
            f"Supported: {', '.join(FAMILIES)}."
        )
    return FAMILIES[architecture]


def checkpoint_name(name: str, path: Path, architecture: str) -> str:
    """The name in a safetensors checkpoint.

    Raises ModelError for a tensor that the lean decoder does not use.
    """
    if name == ROPE_FACTORS:
        return name
    stem, _, suffix = name.rpartition(".")
    if suffix == "ssm_a":  # has none here either
        stem, suffix = name, "weight"
    if suffix in ("weight", "bias"):
        if stem in MODEL_TENSORS:
            return f"{MODEL_TENSORS[stem]}.{suffix}"
        block = re.fullmatch(r"blk\.(\d+)\.(\w+)", stem)
        known = BLOCK_TENSORS | OWN_TENSORS.get(architecture, {})
        if block and block[2] in known:
            name = f"model.layers.{block[1]}.{known[block[2]]}"
            return name if block[2] in WHOLE_NAMES else f"{name}.{suffix}"
    raise ModelError(
        f"{path} has a tensor {name!r}, which the lean decoder does not compute: the architecture is not "
        "supported."
    )
