"""Tiny random checkpoints of families with recurrent layers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from families import NEW

from outrider.testing import random_model

ROUTED: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
LINEAR_FULL = ["linear_attention", "full_attention"] * 2
DELTA: dict[str, Any] = {
    **NEW,
    "head_dim": 16,
    "num_hidden_layers": 4,
    "layer_types": LINEAR_FULL,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 24,
}
MAMBA: dict[str, Any] = {
    **NEW,
    "num_hidden_layers": 4,
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_n_groups": 2,
    "mamba_d_state": 12,
    "mamba_chunk_size": 8,
}
CONV: dict[str, Any] = {
    **NEW,
    "num_hidden_layers": 4,
    "layer_types": ["conv", "full_attention"] * 2,
    "block_auto_adjust_ff_dim": False,
}

HYBRIDS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3-next": (
        "Qwen3Next",
        {**DELTA, **ROUTED, "shared_expert_intermediate_size": 48, "decoder_sparse_step": 2},
    ),
    "qwen3.5": ("Qwen3_5Text", DELTA),
    "qwen3.5-moe": ("Qwen3_5MoeText", {**DELTA, **ROUTED, "shared_expert_intermediate_size": 48}),
    "granite-moe-hybrid": (
        "GraniteMoeHybrid",
        {
            **MAMBA,
            "layer_types": LINEAR_FULL,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "shared_intermediate_size": 48,
            "position_embedding_type": "nope",
        },
    ),
    "granite-hybrid-rope": (
        "GraniteMoeHybrid",
        {
            **MAMBA,
            "layer_types": LINEAR_FULL,
            "num_local_experts": 0,
            "shared_intermediate_size": 96,
            "position_embedding_type": "rope",
            "mamba_conv_bias": False,
            "mamba_proj_bias": True,
        },
    ),
    "lfm2": ("Lfm2", CONV),
    "lfm2-moe": (
        "Lfm2Moe",
        {**CONV, **ROUTED, "conv_bias": True, "num_dense_layers": 1, "use_expert_bias": True},
    ),
    "falcon-h1": ("FalconH1", {**MAMBA, "mamba_d_ssm": 128, "mamba_rms_norm": True}),
    "falcon-h1-no-norm": ("FalconH1", {**MAMBA, "mamba_d_ssm": 128, "mamba_rms_norm": False}),
    "bamba": ("Bamba", {**MAMBA, "attn_layer_indices": [1, 3]}),
    "nemotron-h": (
        "NemotronH",
        {
            **NEW,
            "head_dim": 16,
            "layer_types": ["linear_attention", "mlp", "full_attention", "linear_attention"],
            "num_hidden_layers": 4,
            "mamba_num_heads": 8,
            "mamba_head_dim": 16,
            "n_groups": 2,
            "ssm_state_size": 12,
            "chunk_size": 8,
        },
    ),
    "olmo-hybrid": ("OlmoHybrid", {**DELTA, "linear_num_key_heads": 4}),
    "kimi-linear": (
        "KimiLinear",
        {
            **NEW,
            "num_key_value_heads": 4,
            "num_hidden_layers": 4,
            "layer_types": LINEAR_FULL,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 40,
            "kv_lora_rank": 16,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 16,
            "v_head_dim": 16,
            "linear_attn_config": {"num_heads": 4, "head_dim": 16, "short_conv_kernel_size": 4},
        },
    ),
    "zamba2": (
        "Zamba2",
        {
            **NEW,
            "num_hidden_layers": 4,
            "layers_block_type": ["linear_attention", "hybrid", "linear_attention", "hybrid"],
            "mamba_d_state": 12,
            "mamba_ngroups": 2,
            "n_mamba_heads": 8,
            "mamba_headdim": 16,
            "chunk_size": 8,
            "use_mem_rope": True,
            "num_mem_blocks": 2,
        },
    ),
    "jamba": (
        "Jamba",
        {
            **NEW,
            "num_hidden_layers": 4,
            "attn_layer_period": 2,
            "attn_layer_offset": 1,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "mamba_d_state": 12,
            "mamba_dt_rank": 8,
            "use_mamba_kernels": False,
        },
    ),
}


def write(name: str, folder: Path, dtype: torch.dtype = torch.float32, **more: Any) -> Any:
    """Save the random checkpoint of a family; return the transformers model.  more: config keys."""
    family, config = HYBRIDS[name]
    model = random_model(family, config | more)
    model.to(dtype).save_pretrained(folder)
    return model
