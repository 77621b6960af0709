"""Files of block-parallel heads as they are published, small and random, and the naive network."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from toys import HIDDEN, V

from outrider import LLM, SamplingParams
from outrider.core.step import Batch
from outrider.core.tree import DraftTree
from outrider.heads.blocks import BlockDrafter
from outrider.heads.sample import TargetWeights

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


WIDE = torch.float64


class Case(NamedTuple):
    """windows, causal: what its layers see."""

    config: dict[str, Any]
    tensors: dict[str, Tensor]
    file: str = "model.safetensors"
    windows: tuple[int, ...] = (0, 0)
    causal: tuple[bool, ...] = (False, False)


# ---- the naive block


def norm(x: Tensor, w: Tensor) -> Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + EPS).sqrt() * w


def turned(x: Tensor, t: int) -> Tensor:
    """One head [D] at position t, halves paired."""
    angle = torch.tensor([t / THETA ** (2 * i / D) for i in range(D // 2)], dtype=WIDE)
    a, b = x[: D // 2], x[D // 2 :]
    return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()])


def along(w: dict[str, Tensor], name: str, side: int, u: Tensor, x: Tensor) -> Tensor:
    """x [rows, hidden] before (side 0) or after a sublayer with the input u: row by row, column by column, if
    the file has a convolution there."""
    if f"{name}.base_kernel" not in w:
        return x
    base, projection = w[f"{name}.base_kernel"], w[f"{name}.kernel_projection.weight"]
    taps, groups = base.shape[1], projection.shape[0] // (2 * base.shape[1])
    out = torch.zeros_like(x)
    for row, column in itertools.product(range(len(x)), range(x.shape[1])):
        group = column // (x.shape[1] // groups)
        for tap in range(min(taps, row + 1)):
            dynamic = projection[(side * taps + tap) * groups + group] @ u[row]
            out[row, column] += (dynamic + base[side, tap, column]) * x[row - tap, column]
    return out


def context_of(w: dict[str, Tensor], i: int, taps: Tensor) -> Tensor:
    """What layer i reads of the text, [T, hidden]: the same as all, or a mix of its own."""
    if "layer_fusion_weights" not in w:
        return norm(taps @ w["fc.weight"].T, w["hidden_norm.weight"])
    shares = w["layer_fusion_weights"][i].exp() / w["layer_fusion_weights"][i].exp().sum()
    mix = sum(share * state for share, state in zip(shares, taps.split(HIDDEN, dim=-1)))
    assert isinstance(mix, Tensor)
    return norm(mix, w["hidden_norm.weight"])


def naive(case: Case, outer: TargetWeights, taps: Tensor, anchor: int, count: int) -> Tensor:
    """Logits [count, Vd] of a block behind taps [T, 3 * hidden]: row by row, head by head."""
    w = {name.removeprefix("model."): tensor.to(WIDE) for name, tensor in case.tensors.items()}
    embedding, head = (
        w.get("embed_tokens.weight", outer.embedding.to(WIDE)),
        w.get("lm_head.weight", outer.lm_head.to(WIDE)),
    )
    end = len(taps)
    x = embedding[[anchor, *[MASK] * (count - 1)]]
    for i, (window, causal) in enumerate(zip(case.windows, case.causal)):
        at = f"layers.{i}.self_attn"

        def project(name: str, u: Tensor, at: str = at) -> Tensor:
            return u @ w[f"{at}.{name}.weight"].T + w.get(f"{at}.{name}.bias", torch.zeros((), dtype=WIDE))

        u = norm(x, w[f"layers.{i}.input_layernorm.weight"])
        mixed = along(w, f"layers.{i}.attention_conv", 0, u, u)
        q = project("q_proj", mixed)
        context, own = context_of(w, i, taps.to(WIDE)), f"{at}.k_proj_target.weight" in w
        read = {name: f"{name}_proj_target" if own else f"{name}_proj" for name in "kv"}
        k, v = (torch.cat([project(read[name], context), project(f"{name}_proj", mixed)]) for name in "kv")
        key_norm = w[f"{at}.k_norm.weight"]
        keys = [
            [turned(norm(k[s, g * D : (g + 1) * D], key_norm), s) for s in range(end + count)]
            for g in range(KV)
        ]
        rows = []
        for b in range(count):
            p = end + b
            sees = [
                s
                for s in range(end + count)
                if (not window or s > p - window) and (s < end or not causal or s <= p)
            ]
            parts = []
            for h in range(HEADS):
                g = h // (HEADS // KV)
                mine = turned(norm(q[b, h * D : (h + 1) * D], w[f"{at}.q_norm.weight"]), p)
                weights = torch.stack([mine @ keys[g][s] / math.sqrt(D) for s in sees]).softmax(0)
                parts.append(weights @ v[sees, g * D : (g + 1) * D])
            rows.append(torch.cat(parts))
        x = x + along(w, f"layers.{i}.attention_conv", 1, u, project("o_proj", torch.stack(rows)))
        u = norm(x, w[f"layers.{i}.post_attention_layernorm.weight"])
        y = along(w, f"layers.{i}.mlp_conv", 0, u, u)
        gate = y @ w[f"layers.{i}.mlp.gate_proj.weight"].T
        inner = gate / (1 + (-gate).exp()) * (y @ w[f"layers.{i}.mlp.up_proj.weight"].T)
        x = x + along(w, f"layers.{i}.mlp_conv", 1, u, inner @ w[f"layers.{i}.mlp.down_proj.weight"].T)
    return norm(x, w["norm.weight"]) @ head.T


# ---- in the engine


class BlockOutput(NamedTuple):
    """One block of one row in the engine: the text that was known, logits [levels, Vd] and states."""

    known: list[int]
    logits: Tensor
    states: Tensor


@contextmanager
def recorded_blocks(drafter: BlockDrafter) -> Iterator[list[BlockOutput]]:
    found: list[BlockOutput] = []
    block_logits = drafter.block_logits

    def listening(batch: Batch, rows: Sequence[int], levels: Sequence[int]) -> tuple[Tensor, Tensor]:
        logits, states = block_logits(batch, rows, levels)
        of_rows = states.split([n + drafter.skipped for n in levels])
        found.extend(
            BlockOutput(list(batch[r].row.tokens), part.clone(), x.clone())
            for r, part, x in zip(rows, logits.split(list(levels)), of_rows)
        )
        return logits, states

    drafter.block_logits = listening  # type: ignore[method-assign]
    yield found


class Drafted(NamedTuple):
    """A block, and the chain that became of it."""

    block: BlockOutput
    tree: DraftTree


def drafted(llm: LLM, **params: Any) -> list[Drafted]:
    """The chains of two rows, one with a processor."""
    drafter: BlockDrafter = llm.engine.drafter  # type: ignore[assignment]
    trees: list[tuple[tuple[int, ...], DraftTree]] = []
    propose = drafter.propose

    def listening(batch: Batch) -> Any:
        draft = propose(batch)
        trees.extend((tuple(row.tokens), tree) for row, tree in zip(batch.rows, draft.trees))
        return draft

    drafter.propose = listening  # type: ignore[method-assign]
    prompts = [{"prompt_token_ids": [5, 9, 77, 3]}, {"prompt_token_ids": [8, 2, 1]}]
    given = {"temperature": 0.0, "max_tokens": 12, "ignore_eos": True, **params}
    with recorded_blocks(drafter) as blocks:
        llm.generate(prompts, [SamplingParams(**given), SamplingParams(**given, logit_bias={3: 0.01})])
    found = {tuple(block.known): block for block in blocks}
    return [Drafted(found[known], tree) for known, tree in trees if tree.tokens]
