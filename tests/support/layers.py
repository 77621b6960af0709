"""Prediction layers for tests: our names, published layouts, and a naive float64 forward."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from toys import HIDDEN, LAYERS, V

HEADS, KV, D, INNER, EPS, THETA = 4, 2, 24, 96, 1e-5, 500000.0  # head_dim is not hidden / heads
CONFIG = {
    "hidden_size": HIDDEN, "num_hidden_layers": LAYERS, "vocab_size": V, "num_attention_heads": HEADS,
    "num_key_value_heads": KV,
    "head_dim": D, "intermediate_size": INNER, "rms_norm_eps": EPS, "rope_theta": THETA,
}  # fmt: skip
MIMO = {
    "enorm": "token_layernorm",
    "hnorm": "hidden_layernorm",
    "eh_proj": "input_proj",
    "norm": "final_layernorm",
}


def tensors(layers: int = 1, bias: bool = False, qk_norm: bool = False) -> dict[str, Tensor]:
    """Layers by the names of this test: eh_proj reads [embedding; state]."""
    torch.manual_seed(3)
    shapes: dict[str, tuple[int, ...]] = {}
    for i in range(layers):
        at = f"layers.{i}"
        shapes |= {
            f"{at}.{name}.weight": (HIDDEN,)
            for name in ("enorm", "hnorm", "norm", "input_layernorm", "post_attention_layernorm")
        }
        shapes |= {
            f"{at}.eh_proj.weight": (HIDDEN, 2 * HIDDEN),
            f"{at}.self_attn.o_proj.weight": (HIDDEN, HEADS * D),
        }
        for name, rows in (("q", HEADS * D), ("k", KV * D), ("v", KV * D)):
            shapes[f"{at}.self_attn.{name}_proj.weight"] = (rows, HIDDEN)
            if bias:
                shapes[f"{at}.self_attn.{name}_proj.bias"] = (rows,)
        if qk_norm:
            shapes |= {f"{at}.self_attn.{name}_norm.weight": (D,) for name in "qk"}
        shapes |= {f"{at}.mlp.{name}_proj.weight": (INNER, HIDDEN) for name in ("gate", "up")}
        shapes[f"{at}.mlp.down_proj.weight"] = (HIDDEN, INNER)
    return {name: torch.randn(shape) * 0.2 + ("norm" in name) for name, shape in shapes.items()}


def stored(w: dict[str, Tensor], kind: str) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The same layers as a published layout has them: config and tensors."""
    out: dict[str, Tensor] = {}
    for name, tensor in w.items():
        _, i, rest = name.split(".", 2)
        part, _, kept = rest.rpartition(".")
        if kind == "deepseek":
            out[f"model.layers.{LAYERS + int(i)}.{'shared_head.norm' if part == 'norm' else part}.{kept}"] = (
                tensor
            )
        elif kind == "ernie" and part in ("enorm", "hnorm", "eh_proj"):
            ernie = {"enorm": "mtp_emb_norm", "hnorm": "mtp_hidden_norm", "eh_proj": "mtp_linear_proj"}[part]
            out[f"model.{ernie}.{i}.{kept}"] = tensor
        elif kind == "ernie" and part != "norm":
            out[f"model.mtp_block.{i}.{rest}"] = tensor
        elif kind == "mimo":
            first, second = tensor.chunk(2, dim=-1) if part == "eh_proj" else (tensor, tensor)
            out[f"model.mtp_layers.{i}.{MIMO.get(part, part)}.{kept}"] = (
                torch.cat([second, first], -1) if part == "eh_proj" else tensor
            )
        elif kind == "speculators":
            out[f"mtp_layers.{i}.{MIMO.get(part, part)}.{kept}"] = tensor
    if kind == "speculators":
        return {
            "speculators_model_type": "mtp",
            "transformer_layer_config": CONFIG,
            "num_nextn_predict_layers": 1,
        }, out
    if kind == "deepseek":
        shared = torch.zeros(V, HIDDEN)  # copies of the target's, which are used instead
        out |= {
            f"model.layers.{LAYERS}.embed_tokens.weight": shared,
            f"model.layers.{LAYERS}.shared_head.head.weight": shared,
        }
    return {**CONFIG, "num_nextn_predict_layers": len({name.split(".")[1] for name in w})}, out


# ---- the naive layers


def norm(x: Tensor, w: Tensor) -> Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + EPS).sqrt() * w


def turned(x: Tensor, paired: bool) -> Tensor:
    """Heads [T, n, D] at positions 0, 1 …: (i, i + D/2) turn together, or (2i, 2i + 1)."""
    speed = THETA ** (-torch.arange(0, D, 2, dtype=torch.float64) / D)
    angle = (torch.arange(len(x))[:, None] * speed)[:, None]
    a, b = (x[..., 0::2], x[..., 1::2]) if paired else (x[..., : D // 2], x[..., D // 2 :])
    parts = a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()
    return torch.stack(parts, -1).flatten(-2) if paired else torch.cat(parts, -1)


def naive(w: dict[str, Tensor], i: int, e: Tensor, g: Tensor, paired: bool = False) -> Tensor:
    """Output of layer i for the pairs (g_t, e) of a whole text, [T, hidden], before its last norm."""
    mine = {
        name.removeprefix(f"layers.{i}."): tensor.double()
        for name, tensor in w.items()
        if name.startswith(f"layers.{i}.")
    }
    none = torch.zeros((), dtype=torch.float64)
    x = (
        torch.cat([norm(e.double(), mine["enorm.weight"]), norm(g.double(), mine["hnorm.weight"])], -1)
        @ mine["eh_proj.weight"].T
    )
    u = norm(x, mine["input_layernorm.weight"])
    q, k, v = (
        u @ mine[f"self_attn.{name}_proj.weight"].T + mine.get(f"self_attn.{name}_proj.bias", none)
        for name in "qkv"
    )
    heads = {"q": q.unflatten(1, (HEADS, D)), "k": k.unflatten(1, (KV, D))}
    for name in heads:
        if f"self_attn.{name}_norm.weight" in mine:
            heads[name] = norm(heads[name], mine[f"self_attn.{name}_norm.weight"])
        heads[name] = turned(heads[name], paired)
    keys, values = (
        part.repeat_interleave(HEADS // KV, dim=1) for part in (heads["k"], v.unflatten(1, (KV, D)))
    )
    scores = torch.einsum("thd,shd->hts", heads["q"], keys) / math.sqrt(D)
    ahead = torch.ones(len(u), len(u), dtype=torch.bool).triu(1)
    out = torch.einsum("hts,shd->thd", scores.masked_fill(ahead, float("-inf")).softmax(-1), values).flatten(
        1
    )
    x = x + out @ mine["self_attn.o_proj.weight"].T
    y = norm(x, mine["post_attention_layernorm.weight"])
    gate = y @ mine["mlp.gate_proj.weight"].T
    return (
        x + (gate / (1 + (-gate).exp()) * (y @ mine["mlp.up_proj.weight"].T)) @ mine["mlp.down_proj.weight"].T
    )


def sized(w: dict[str, Tensor]) -> dict[str, Tensor]:
    """For 4 heads over 2 of 16 dimensions, the toy's own."""
    rows = {"q": 64, "k": 32, "v": 32}

    def cut(name: str, tensor: Tensor) -> Tensor:
        _, attention, rest = name.partition("self_attn.")
        if not attention or "_proj" not in rest:
            return tensor
        return tensor[:, :64] if rest.startswith("o") else tensor[: rows[rest[0]]]

    return {name: cut(name, tensor) for name, tensor in w.items()}
