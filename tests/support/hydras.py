"""Hydra's published files, a naive float64 forward over them, and a recorder in the engine."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from toys import HIDDEN, V, read, toy_target

from outrider import LLM
from outrider.core.step import FINAL
from outrider.heads.sample import TargetWeights

HEADS, BLOCKS, Q, KV, D, INNER, EPS, THETA = (
    4,
    4,
    4,
    2,
    24,
    96,
    1e-3,
    500.0,
)  # the prefix layer is a layer of the target
CONFIG = {
    "base_model_name_or_path": "toy", "grounded_heads": True, "hidden_state_offset": 0,
    "hydra_head_arch": "prefix-mlp",
    "hydra_num_heads": HEADS, "hydra_num_layers": BLOCKS, "transformers_version": "4.34.1",
}  # fmt: skip
AT = "prefix_embeding_layer"


def toy_like(folder: Path) -> str:
    """The toy target with the sizes of the prefix layer.  Its text depends mostly on the last token."""
    rope = {"rope_type": "default", "rope_theta": THETA}
    made = toy_target(folder, head_dim=D, rms_norm_eps=EPS, rope_parameters=rope)
    stored = load_file(folder / "model.safetensors")
    stored["model.embed_tokens.weight"] *= 8.0
    save_file(stored, folder / "model.safetensors", {"format": "pt"})
    return made


# ---- the reference's files, from their description


def tensors(arch: str = "prefix-mlp", hidden: int = HIDDEN, vocabulary: int = V) -> dict[str, Tensor]:
    """Names and shapes; a head's blocks after the first are one tensor under several names."""
    torch.manual_seed(5)
    dropout = arch == "prefix-mlp"
    w: dict[str, Tensor] = {"input_embed_fn.weight": torch.zeros(vocabulary, hidden)}
    for i in range(HEADS):
        slots = [1 + 2 * j if dropout else j for j in range(BLOCKS)]
        for part in ("linear", "res_connection"):
            w[f"hydra_mlp.{i}.{slots[0]}.{part}.weight"] = torch.randn(hidden, (i + 2) * hidden) * 0.1
            w[f"hydra_mlp.{i}.{slots[0]}.{part}.bias"] = torch.randn(hidden)
        shared = torch.randn(hidden, hidden) * 0.1, torch.randn(hidden)
        for slot in slots[1:]:
            w[f"hydra_mlp.{i}.{slot}.linear.weight"], w[f"hydra_mlp.{i}.{slot}.linear.bias"] = shared
        at = f"hydra_lm_head.{i}.1" if dropout else f"hydra_lm_head.{i}"
        w[f"{at}.weight"], w[f"{at}.bias"] = torch.randn(vocabulary, hidden) * 0.1, torch.randn(vocabulary)
    return {**w, **prefix_tensors()} if dropout else w


def prefix_tensors() -> dict[str, Tensor]:
    w, at = (
        {f"{AT}.embed_tokens.weight": torch.zeros(V, HIDDEN), f"{AT}.norm.weight": torch.rand(HIDDEN) + 0.5},
        f"{AT}.layers.0",
    )
    shapes = {"q": (Q * D, HIDDEN), "k": (KV * D, HIDDEN), "v": (KV * D, HIDDEN), "o": (HIDDEN, Q * D)}
    w |= {f"{at}.self_attn.{name}_proj.weight": torch.randn(shape) * 0.3 for name, shape in shapes.items()}
    w |= {f"{at}.mlp.{name}_proj.weight": torch.randn(INNER, HIDDEN) * 0.2 for name in ("gate", "up")}
    w[f"{at}.mlp.down_proj.weight"] = torch.randn(HIDDEN, INNER) * 0.2
    w |= {f"{at}.{name}_layernorm.weight": torch.rand(HIDDEN) + 0.5 for name in ("input", "post_attention")}
    return w | {f"{at}.self_attn.rotary_emb.inv_freq": torch.ones(D // 2)}


def once(w: dict[str, Tensor]) -> dict[str, Tensor]:
    """What is shared is stored once, as `safetensors.torch.save_model` does."""
    kept: dict[int, str] = {}
    return {
        name: tensor for name, tensor in sorted(w.items()) if kept.setdefault(tensor.data_ptr(), name) == name
    }


# ---- a naive forward


def norm(x: Tensor, w: Tensor) -> Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + EPS).sqrt() * w


def prefixed(w: dict[str, Tensor], f: Tensor) -> Tensor:
    """P_t of the states f_0 … f_t, [t + 1, hidden] in float64: the block and the norm."""
    at, n, half = f"{AT}.layers.0", len(f), D // 2
    u = norm(f, w[f"{at}.input_layernorm.weight"])
    q, k, v = (
        (u @ w[f"{at}.self_attn.{name}_proj.weight"].T).view(n, heads, D).transpose(0, 1)
        for name, heads in (("q", Q), ("k", KV), ("v", KV))
    )
    angle = torch.arange(n)[:, None] / THETA ** (torch.arange(half).double() / half)

    def turned(x: Tensor) -> Tensor:
        a, b = x[..., :half], x[..., half:]
        return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], dim=-1)

    q, k, v = turned(q), turned(k).repeat_interleave(Q // KV, 0), v.repeat_interleave(Q // KV, 0)
    scores = (q @ k.transpose(1, 2) / D**0.5).masked_fill(torch.ones(n, n).triu(1).bool(), float("-inf"))
    x = f + (scores.softmax(-1) @ v).transpose(0, 1).flatten(1) @ w[f"{at}.self_attn.o_proj.weight"].T
    y = norm(x, w[f"{at}.post_attention_layernorm.weight"])
    gate = y @ w[f"{at}.mlp.gate_proj.weight"].T
    x = (
        x
        + (gate * gate.sigmoid() * (y @ w[f"{at}.mlp.up_proj.weight"].T)) @ w[f"{at}.mlp.down_proj.weight"].T
    )
    return norm(x, w[f"{AT}.norm.weight"])[-1]


def naive(w: dict[str, Tensor], f: Tensor, embedded: Tensor) -> Tensor:
    """Logits [V] of the head that reads f_0 … f_t and the embeddings [1 + i, hidden] of its draft."""
    w = {name: tensor.double() for name, tensor in w.items()}
    i, dropout = len(embedded) - 1, f"{AT}.norm.weight" in w
    p = prefixed(w, f.double()) if dropout else f[-1].double()
    z = torch.cat([p, embedded.double().flatten()])

    def linear(name: str, x: Tensor) -> Tensor:
        return w[f"{name}.weight"] @ x + w[f"{name}.bias"]

    at = f"hydra_mlp.{i}.{int(dropout)}"
    modified = linear(f"{at}.linear", z)
    x = linear(f"{at}.res_connection", z) + modified * modified.sigmoid()
    for _ in range(BLOCKS - 1):  # the same every time
        modified = linear(f"hydra_mlp.{i}.{3 if dropout else 1}.linear", x)
        x = x + modified * modified.sigmoid()
    return linear(f"hydra_lm_head.{i}.1" if dropout else f"hydra_lm_head.{i}", x)


# ---- records of the engine

Heard = dict[tuple[tuple[int, ...], tuple[int, ...]], Tensor]


def overhear(llm: LLM) -> Heard:
    """Record the head's logits by (tokens of the row, draft tokens after them)."""
    heard: Heard = {}
    choose = llm.engine.drafter.choose  # type: ignore[attr-defined]
    best, distribution = choose.best, choose.distribution

    def note(row: Any, path: Sequence[int], logits: Tensor) -> None:
        key = tuple(row.tokens), tuple(path)
        assert key not in heard or torch.equal(heard[key], logits), "the same question got two answers"
        heard[key] = logits.clone()

    def hearing_best(row: Any, paths: Sequence[Sequence[int]], logits: Tensor, k: int) -> Any:
        for path, output in zip(paths, logits):
            note(row, path, output)
        return best(row, paths, logits, k)

    def recording(row: Any, path: Sequence[int], logits: Tensor) -> Any:
        note(row, path, logits)
        return distribution(row, path, logits)

    choose.best, choose.distribution = hearing_best, recording
    choose.stays_on_device = lambda rows: False  # there, no path is given
    return heard


def judged(toy: LLM, w: dict[str, Tensor], heard: Heard, most: int = 24, state: int = FINAL) -> None:
    """Drafts equal the naive forward over states that the target computes anew."""
    model, outer = toy.engine.decoder, TargetWeights.of(toy.engine.decoder)
    keys = sorted(heard, key=lambda key: (len(key[1]), key))
    for tokens, path in keys[:: max(1, len(keys) // most)]:
        f = read(model, tokens, (state,)).states[state][:-1]
        expected = naive(w, f, outer.embedding[[tokens[-1], *path]])
        assert torch.allclose(heard[tokens, path].double(), expected, atol=2e-3, rtol=1e-4), (
            len(tokens),
            path,
        )
    assert {len(path) for _, path in keys} == set(range(HEADS)), "every head should have been asked"


def prompts(count: int = 3, length: int = 30) -> list[dict[str, list[int]]]:
    return [
        {"prompt_token_ids": [(7 * i + 13 * j * j + 5) % V for j in range(length + 9 * i)]}
        for i in range(count)
    ]


def engine(target: str, folder: str, **options: Any) -> LLM:
    named = {"method": "hydra", "model": folder, "tree": "mc_sim_7b_63", "nodes": 40}
    speculation = {
        **named,
        **{key: options.pop(key) for key in list(options) if key in (*named, "verification", "quantization")},
    }
    return LLM(target, dtype="float32", speculative_config=speculation, **options)
