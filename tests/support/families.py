"""Tiny random checkpoints of many families, by the name of their config."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from outrider.testing import random_model
from outrider.testing.checkpoints import TINY

IDS: dict[str, Any] = {
    "vocab_size": TINY["vocab_size"],
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
    "tie_word_embeddings": False,
}
NEW: dict[str, Any] = {**TINY, **IDS, "initializer_range": 0.25}
OLD: dict[str, Any] = {
    **IDS,
    "n_embd": 64,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 256,
    "initializer_range": 0.25,
}
FALCON: dict[str, Any] = {
    k: v for k, v in NEW.items() if k not in ("intermediate_size", "num_key_value_heads")
}
OPT: dict[str, Any] = {**FALCON, "ffn_dim": 96, "word_embed_proj_dim": 64, "init_std": 0.25}
EXPERTS: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
LATENT: dict[str, Any] = {
    **NEW,
    "num_key_value_heads": 4,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 40,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
}

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "opt": ("OPT", OPT),
    "opt-post-norm-projected": ("OPT", {**OPT, "word_embed_proj_dim": 32, "do_layer_norm_before": False}),
    "gpt2": ("GPT2", {**OLD, "tie_word_embeddings": True}),
    "gpt-neox": ("GPTNeoX", {**NEW, "rotary_pct": 0.5}),
    "gpt-neox-sequential": ("GPTNeoX", {**NEW, "use_parallel_residual": False}),
    "gpt-bigcode-multi-query": ("GPTBigCode", OLD),
    "gpt-neo-local": (
        "GPTNeo",
        {
            **IDS,
            "hidden_size": 64,
            "num_layers": 2,
            "num_heads": 4,
            "max_position_embeddings": 256,
            "window_size": 9,
            "attention_types": [[["global", "local"], 1]],
            "initializer_range": 0.25,
        },
    ),
    "gptj": ("GPTJ", {**OLD, "rotary_dim": 8}),
    "codegen": ("CodeGen", {**OLD, "rotary_dim": 8}),
    "bloom-six-heads": (
        "Bloom",
        {**IDS, "hidden_size": 96, "n_layer": 2, "n_head": 6, "initializer_range": 0.25},
    ),
    "mpt": (
        "Mpt",
        {**IDS, "d_model": 64, "n_layers": 2, "n_heads": 4, "max_seq_len": 256, "initializer_range": 0.25},
    ),
    "falcon-multi-query": ("Falcon", FALCON),
    "falcon-new": ("Falcon", {**FALCON, "num_kv_heads": 2, "new_decoder_architecture": True}),
    "falcon-alibi": (
        "Falcon",
        {**FALCON, "alibi": True, "multi_query": False, "bias": True, "parallel_attn": False},
    ),
    "falcon-alibi-six-heads-multi-query": (
        "Falcon",
        {**FALCON, "hidden_size": 96, "num_attention_heads": 6, "alibi": True},
    ),
    "phi": ("Phi", {**NEW, "partial_rotary_factor": 0.5}),
    "phi3-window": ("Phi3", {**NEW, "sliding_window": 13}),
    "vaultgemma": (
        "VaultGemma",
        {
            **NEW,
            "head_dim": 16,
            "query_pre_attn_scalar": 24,
            "sliding_window": 11,
            "attn_logit_softcapping": 5.0,
            "final_logit_softcapping": 8.0,
        },
    ),
    "gemma3n-shared-kv": (
        "Gemma3nText",
        {
            **NEW,
            "head_dim": 16,
            "num_hidden_layers": 6,
            "intermediate_size": [96] * 6,
            "sliding_window": 11,
            "hidden_size_per_layer_input": 8,
            "vocab_size_per_layer_input": TINY["vocab_size"],
            "num_kv_shared_layers": 2,
            "laurel_rank": 8,
            "activation_sparsity_pattern": [0.5] * 2 + [0.0] * 4,
            "layer_types": ["sliding_attention", "full_attention"] * 3,
        },
    ),
    "gemma4-shared-kv": (
        "Gemma4Text",
        {
            **NEW,
            "head_dim": 16,
            "global_head_dim": 32,
            "num_hidden_layers": 6,
            "sliding_window": 11,
            "hidden_size_per_layer_input": 8,
            "vocab_size_per_layer_input": TINY["vocab_size"],
            "num_kv_shared_layers": 2,
            "layer_types": ["sliding_attention", "full_attention"] * 3,
        },
    ),
    "gemma4-experts": (
        "Gemma4Text",
        {
            **NEW,
            "head_dim": 16,
            "global_head_dim": 32,
            "num_hidden_layers": 4,
            "sliding_window": 11,
            "hidden_size_per_layer_input": 0,
            "num_kv_shared_layers": 0,
            "enable_moe_block": True,
            "num_experts": 4,
            "top_k_experts": 2,
            "moe_intermediate_size": 48,
            "attention_k_eq_v": True,
            "num_global_key_value_heads": 1,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
        },
    ),
    "qwen2-moe": ("Qwen2Moe", {**NEW, **EXPERTS, "shared_expert_intermediate_size": 80}),
    "gpt-oss": (
        "GptOss",
        {
            **NEW,
            "head_dim": 16,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "sliding_window": 11,
            "intermediate_size": 44,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
        },
    ),
    "deepseek-v3": ("DeepseekV3", LATENT),
    "glm4-moe": (
        "Glm4Moe",
        {
            **NEW,
            "head_dim": 16,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 40,
            "first_k_dense_replace": 1,
        },
    ),
    "llama4": (
        "Llama4Text",
        {
            **NEW,
            "head_dim": 16,
            "num_hidden_layers": 3,
            "num_local_experts": 4,
            "intermediate_size_mlp": 80,
            "interleave_moe_layer_step": 2,
            "no_rope_layer_interval": 3,
            "attention_chunk_size": 13,
            "floor_scale": 8,
            "attn_scale": 0.7,
        },
    ),
    "llama4-two-experts": (
        "Llama4Text",
        {
            **NEW,
            "head_dim": 16,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "intermediate_size_mlp": 80,
            "no_rope_layer_interval": 2,
            "attention_chunk_size": 7,
            "use_qk_norm": False,
        },
    ),
    "granite": (
        "Granite",
        {
            **NEW,
            "embedding_multiplier": 3.0,
            "logits_scaling": 2.0,
            "residual_multiplier": 0.7,
            "attention_multiplier": 0.2,
        },
    ),
    "smollm3": ("SmolLM3", {**NEW, "no_rope_layer_interval": 2}),
    "stablelm": ("StableLm", {**NEW, "partial_rotary_factor": 0.5}),
    "stablelm-parallel": (
        "StableLm",
        {**NEW, "qk_layernorm": True, "use_parallel_residual": True, "use_qkv_bias": True},
    ),
    "olmo2": ("Olmo2", NEW),
    "cohere": ("Cohere", {**NEW, "use_qk_norm": True}),
    "cohere2": ("Cohere2", {**NEW, "sliding_window": 11}),
    "starcoder2": ("Starcoder2", {**NEW, "sliding_window": 12}),
    "glm4": ("Glm4", {**NEW, "head_dim": 16}),
    "phimoe": ("Phimoe", {**NEW, "num_local_experts": 4, "sliding_window": 11}),
    "biogpt": ("BioGpt", FALCON | {"intermediate_size": 96}),
    "llama-gelu": ("Llama", {**NEW, "hidden_act": "gelu_pytorch_tanh", "intermediate_size": 90}),
}


def write(name: str, folder: Path, dtype: torch.dtype = torch.float32, **more: Any) -> Any:
    """Save the random checkpoint of a family; return the transformers model.  more: config keys."""
    family, config = FAMILIES[name]
    model = random_model(family, config | more)
    model.to(dtype).save_pretrained(folder)
    return model
