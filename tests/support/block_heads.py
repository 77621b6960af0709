"""Files of block-parallel heads as they are published, small and random."""

from __future__ import annotations

import random
from typing import Any

import torch
from torch import Tensor
from toys import HIDDEN, V

HEADS, KV, D, INNER, EPS, THETA, TAPS, BLOCK, MASK = 4, 2, 24, 96, 1e-5, 5e5, (2, 4, 8), 6, 500
IDS = sorted(random.Random(5).sample(range(V), V // 4))


def tensors(layers: int = 2, taps: int = len(TAPS), bias: bool = False) -> dict[str, Tensor]:
    """The published names and shapes."""
    torch.manual_seed(3)
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (HIDDEN, taps * HIDDEN),
        "hidden_norm.weight": (HIDDEN,),
        "norm.weight": (HIDDEN,),
    }
    for i in range(layers):
        at = f"layers.{i}"
        for name, rows, inputs in (
            ("q", HEADS * D, HIDDEN),
            ("k", KV * D, HIDDEN),
            ("v", KV * D, HIDDEN),
            ("o", HIDDEN, HEADS * D),
        ):
            shapes[f"{at}.self_attn.{name}_proj.weight"] = (rows, inputs)
            if bias:
                shapes[f"{at}.self_attn.{name}_proj.bias"] = (rows,)
        shapes |= {f"{at}.self_attn.{name}_norm.weight": (D,) for name in "qk"}
        shapes[f"{at}.mlp.gate_proj.weight"] = shapes[f"{at}.mlp.up_proj.weight"] = (INNER, HIDDEN)
        shapes[f"{at}.mlp.down_proj.weight"] = (HIDDEN, INNER)
        shapes |= {f"{at}.{name}_layernorm.weight": (HIDDEN,) for name in ("input", "post_attention")}
    return {
        name: torch.randn(shape) * 0.15 + (len(shape) == 1 and "norm" in name)
        for name, shape in shapes.items()
    }


SIZES = {
    "model_type": "qwen3", "hidden_size": HIDDEN, "intermediate_size": INNER, "num_hidden_layers": 2,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV, "head_dim": D, "rms_norm_eps": EPS, "rope_theta": THETA, "vocab_size": V,
}  # fmt: skip


def speculators(sizes: dict[str, Any] | None = None, **given: Any) -> dict[str, Any]:
    base = {
        "speculators_model_type": "dflash",
        "block_size": BLOCK,
        "mask_token_id": MASK,
        "aux_hidden_state_layer_ids": list(TAPS),
    }
    return {**base, "transformer_layer_config": {**SIZES, **(sizes or {})}, **given}


def zlab(inner: dict[str, Any] | None = None, **given: Any) -> dict[str, Any]:
    own = {"mask_token_id": MASK, "target_layer_ids": [tap - 1 for tap in TAPS], **(inner or {})}
    return {
        **SIZES,
        "architectures": ["DFlashDraftModel"],
        "block_size": BLOCK,
        "dflash_config": own,
        **given,
    }


def dspark(rank: int = 8, layers: int = 2, **given: Any) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """SpecForge's: flat, with the class of a plain block, and all that is DSpark's in dflash_config."""
    own = {
        "projector_type": "dspark",
        "markov_rank": rank,
        "markov_head_type": "vanilla",
        "enable_confidence_head": True,
        **given,
    }
    extra = {f"markov_head.markov_w{i}.weight": torch.randn(V, rank) for i in (1, 2)}
    extra |= {
        "confidence_head.proj.weight": torch.randn(1, HIDDEN + rank),
        "confidence_head.proj.bias": torch.randn(1),
    }
    return zlab(own), {**tensors(layers), **extra}
