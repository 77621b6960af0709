"""EAGLE heads under published names, and the naive network in float64."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from toys import HIDDEN, V

HEADS, KV, D, INNER, EPS = 4, 2, 24, 96, 1e-5  # head_dim is not hidden / heads
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": HIDDEN,
    "num_hidden_layers": 36,
    "vocab_size": V,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV,
    "head_dim": D,
    "intermediate_size": INNER,
    "rms_norm_eps": EPS,
    "rope_theta": 500000.0,
    "bias": False,
}


def tensors(fc_bias: bool = False, qkv_bias: bool = False, layers: int = 1) -> dict[str, Tensor]:
    """The reference's names and shapes, from its description."""
    torch.manual_seed(3)
    shapes: dict[str, tuple[int, ...]] = {
        "embed_tokens.weight": (V, HIDDEN),
        "fc.weight": (HIDDEN, 2 * HIDDEN),
    }
    if fc_bias:
        shapes["fc.bias"] = (HIDDEN,)
    for i in range(layers):
        at = f"layers.{i}"
        for name, rows in (("q", HEADS * D), ("k", KV * D), ("v", KV * D)):
            shapes[f"{at}.self_attn.{name}_proj.weight"] = (rows, HIDDEN)
            if qkv_bias:
                shapes[f"{at}.self_attn.{name}_proj.bias"] = (rows,)
        shapes[f"{at}.self_attn.o_proj.weight"] = (HIDDEN, HEADS * D)
        shapes[f"{at}.mlp.gate_proj.weight"] = shapes[f"{at}.mlp.up_proj.weight"] = (INNER, HIDDEN)
        shapes[f"{at}.mlp.down_proj.weight"] = (HIDDEN, INNER)
        shapes[f"{at}.post_attention_layernorm.weight"] = (HIDDEN,)
        if i:
            shapes[f"{at}.input_layernorm.weight"] = (HIDDEN,)
    return {
        name: torch.randn(shape) * 0.2 + (len(shape) == 1 and "norm" in name)
        for name, shape in shapes.items()
    }


def norm(x: Tensor, w: Tensor | None) -> Tensor:
    return x if w is None else x / (x.pow(2).mean(-1, keepdim=True) + EPS).sqrt() * w


def turned(x: Tensor, t: int, theta: float) -> Tensor:
    """One head [D] at position t, halves paired."""
    half = D // 2
    angle = torch.tensor([t / theta ** (2 * i / D) for i in range(half)], dtype=torch.float64)
    a, b = x[:half], x[half:]
    return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()])


def naive(w: dict[str, Tensor], e: Tensor, f: Tensor, theta: float = 500000.0) -> Tensor:
    """o_t for all pairs (f_t, x_t+1), [T, hidden]; e and f [T, hidden].  A naive forward, head by head."""
    w = {name: tensor.double() for name, tensor in w.items()}
    e, f = norm(e.double(), w.get("enorm.weight")), norm(f.double(), w.get("hnorm.weight"))
    x = torch.cat([e, f], dim=-1) @ w["fc.weight"].T + w.get(
        "fc.bias", torch.zeros(HIDDEN, dtype=torch.float64)
    )
    for i in range(sum("q_proj.weight" in name for name in w)):
        at, out = f"layers.{i}", []
        u = norm(x, w.get(f"{at}.input_layernorm.weight"))
        q, k, v = (
            (
                u @ w[f"{at}.self_attn.{name}_proj.weight"].T
                + w.get(f"{at}.self_attn.{name}_proj.bias", torch.zeros((), dtype=torch.float64))
            )
            for name in "qkv"
        )
        keys = [[turned(k[s, g * D : (g + 1) * D], s, theta) for s in range(len(u))] for g in range(KV)]
        for t in range(len(u)):
            parts = []
            for h in range(HEADS):
                g = h // (HEADS // KV)
                mine = turned(q[t, h * D : (h + 1) * D], t, theta)
                scores = torch.stack([mine @ key / math.sqrt(D) for key in keys[g][: t + 1]])
                parts.append(scores.softmax(0) @ v[: t + 1, g * D : (g + 1) * D])
            out.append(torch.cat(parts))
        x = x + torch.stack(out) @ w[f"{at}.self_attn.o_proj.weight"].T
        y = norm(x, w[f"{at}.post_attention_layernorm.weight"])
        gate = y @ w[f"{at}.mlp.gate_proj.weight"].T
        x = (
            x
            + (gate / (1 + (-gate).exp()) * (y @ w[f"{at}.mlp.up_proj.weight"].T))
            @ w[f"{at}.mlp.down_proj.weight"].T
        )
    return x


def layouts(w: dict[str, Tensor]) -> dict[str, tuple[dict[str, Any], dict[str, Tensor], str]]:
    """One network in every layout: config, tensors, file."""
    bare = {name: tensor for name, tensor in w.items() if name != "embed_tokens.weight"}
    head = {"lm_head.weight": torch.zeros(V, HIDDEN)}  # a copy of the target's, which is used instead
    fused = {
        name.replace("fc.", "fusion_fc.").replace("layers.0.", "transformer."): tensor
        for name, tensor in bare.items()
    }
    v01 = {
        "speculators_model_type": "eagle",
        "transformer_layer_config": CONFIG,
        "layernorms": False,
        "fusion_bias": "fc.bias" in w,
    }
    return {
        "reference .bin": (CONFIG, w, "pytorch_model.bin"),
        "reference safetensors": (CONFIG, w, "model.safetensors"),
        "vllm converted": (
            {"model_type": "eagle", "model": CONFIG, "eagle_fc_bias": False},
            {
                **{name if name.startswith("fc") else f"model.{name}": tensor for name, tensor in w.items()},
                **head,
            },
            "model.safetensors",
        ),
        "vllm prefixed twice": (
            {"model_type": "eagle", "model": CONFIG},
            {
                **{f"model.model.{name}": tensor for name, tensor in bare.items()},
                "model.lm_head.weight": head["lm_head.weight"],
            },
            "pytorch_model.bin",
        ),
        "speculators 0.1": (v01, fused, "model.safetensors"),
    }
