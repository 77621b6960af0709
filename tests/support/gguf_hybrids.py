"""Gated delta rules in the layout of GGUF files, as llama.cpp's converter writes them."""

from __future__ import annotations

from typing import Any

import gguf
import numpy as np
import torch

DELTA_NAMES = {
    "post_attention_layernorm": "post_attention_norm",
    "linear_attn.in_proj_qkv": "attn_qkv", "linear_attn.in_proj_z": "attn_gate",
    "linear_attn.in_proj_a": "ssm_alpha", "linear_attn.in_proj_b": "ssm_beta",
    "linear_attn.in_proj_ba": "ssm_ba", "linear_attn.conv1d": "ssm_conv1d",
    "linear_attn.norm": "ssm_norm", "linear_attn.out_proj": "ssm_out",
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp", "mlp.shared_expert.gate_proj": "ffn_gate_shexp",
    "mlp.shared_expert.up_proj": "ffn_up_shexp", "mlp.shared_expert.down_proj": "ffn_down_shexp",
}  # fmt: skip
HYBRID_TYPES = ("qwen3_5_text", "qwen3_5_moe_text", "qwen3_next")


def delta_fields(writer: gguf.GGUFWriter, config: Any) -> None:
    writer.add_ssm_conv_kernel(config.linear_conv_kernel_dim)
    writer.add_ssm_state_size(config.linear_key_head_dim)
    writer.add_ssm_group_count(config.linear_num_key_heads)
    writer.add_ssm_time_step_rank(config.linear_num_value_heads)
    writer.add_ssm_inner_size(config.linear_value_head_dim * config.linear_num_value_heads)
    recurrent = [kind == "linear_attention" for kind in config.layer_types]
    writer.add_array(f"{writer.arch}.attention.recurrent_layers", recurrent)
    writer.add_rope_dimension_count(int(config.head_dim * config.rope_parameters["partial_rotary_factor"]))
    if shared := getattr(config, "shared_expert_intermediate_size", None):
        writer.add_expert_count(config.num_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
        writer.add_expert_shared_feed_forward_length(shared)


def layout(name: str, places: np.ndarray, config: Any) -> dict[str, np.ndarray]:
    """Where the numbers of a tensor go: name of a tensor of the file (as of a checkpoint) -> its numbers.

    places: the numbers of the tensor, in their order in the checkpoint
    """
    keys, values = config.linear_num_key_heads, config.linear_num_value_heads
    key_dim, dim, per = config.linear_key_head_dim, config.linear_value_head_dim, values // keys
    if name.endswith("shared_expert_gate.weight"):
        return {name: places[0]}
    if "linear_attn." not in name:
        return {name: places}
    if name.endswith("conv1d.weight"):
        places = places[:, 0]
    if name.endswith("in_proj_qkvz.weight"):
        groups = places.reshape(keys, -1, places.shape[1])
        q, k, v, z = np.split(groups, np.cumsum([key_dim, key_dim, per * dim]), axis=1)
        flat = [part.reshape(-1, places.shape[1]) for part in (q, k, v, z)]
        return {name.replace("qkvz", "qkv"): np.concatenate(flat[:3]), name.replace("qkvz", "z"): flat[3]}
    if config.model_type == "qwen3_next":
        return {name: places}

    def tiled(part: np.ndarray, size: int) -> np.ndarray:
        """Value head v of key head k is head v * keys + k, rather than k * per + v."""
        heads = [k * per + v for v in range(per) for k in range(keys)]
        return np.concatenate([part[head * size : (head + 1) * size] for head in heads])

    if "in_proj_qkv." in name or "conv1d" in name:
        behind = 2 * keys * key_dim
        places = np.concatenate([places[:behind], tiled(places[behind:], dim)])
    elif "in_proj_z" in name:
        places = tiled(places, dim)
    elif "out_proj" in name:
        places = tiled(places.T, dim).T
    elif "linear_attn.norm" not in name:
        places = tiled(places, 1)
    return {name: places}


def changed(name: str, rows: np.ndarray) -> np.ndarray:
    """What the file holds in place of the numbers of a checkpoint."""
    if name.endswith("A_log"):
        return (-torch.from_numpy(rows).exp()).numpy()
    return rows + 1 if name.endswith("norm.weight") and "linear_attn" not in name else rows


def file_name(name: str) -> str | None:
    """The name in the file of a tensor without a suffix in the checkpoint."""
    _, _, layer, part = name.split(".", 3) if name.startswith("model.layers.") else ("", "", "", "")
    own = {"linear_attn.A_log": "ssm_a", "linear_attn.dt_bias": "ssm_dt.bias"}
    return f"blk.{layer}.{own[part]}" if part in own else None
