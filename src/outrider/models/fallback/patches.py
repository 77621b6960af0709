"""Patches of model families that do not use transformers' attention interface: they call our attention.

Later versions of transformers bring families to the interface, GPT-J and CodeGen in 5.24.  Those are left
as they are.  In GPT-J, CodeGen and GPT-Neo a method is replaced.  In BLOOM, MPT and Falcon attention is part
of `forward`, so the projections are repeated here.  The first argument of each function is the attention
module.
"""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

# (module, q, k, v, mask, scaling=…, window=…, slopes=…) -> ([1,n,H,D], None)
Attend = Callable[..., tuple[Tensor, None]]
SHORTEST = 64  # minimum positions of a table: loading runs a few tokens, however short the context


def gptj(
    attend: Attend, module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any = None
) -> tuple[Tensor, None]:
    return attend(module, q, k, v, None, scaling=1.0 / module.scale_attn)[0].transpose(1, 2), None


def gpt_neo(
    attend: Attend, module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any = None
) -> tuple[Tensor, None]:
    """GPT-Neo: scores are not scaled, and every other layer has local attention."""
    window = module.config.window_size if module.attention_type == "local" else None
    return attend(module, q, k, v, None, scaling=1.0, window=window)[0].transpose(1, 2), None


@functools.cache
def bloom_slopes(heads: int, device: torch.device) -> Tensor:
    from transformers.models.bloom.modeling_bloom import _get_alibi_slopes

    slopes: Tensor = _get_alibi_slopes(heads, device)
    return slopes


def bloom(
    attend: Attend, module: Any, x: Tensor, residual: Tensor, alibi: Any, attention_mask: Any, **_: Any
) -> tuple[Tensor, None]:
    slopes = bloom_slopes(module.num_heads, x.device)
    q, k, v = module._reshape(module.query_key_value(x))
    out, _weights = attend(module, q, k, v, None, scaling=module.inv_norm_factor, slopes=slopes)
    return module.dense(out.flatten(2)) + residual, None


def mpt(attend: Attend, module: Any, x: Tensor, position_bias: Any, **_: Any) -> tuple[Tensor, None]:
    qkv = module.Wqkv(x)
    if module.clip_qkv:
        qkv = qkv.clamp(-module.clip_qkv, module.clip_qkv)
    q, k, v = (
        part.unflatten(2, (module.n_heads, module.head_dim)).transpose(1, 2) for part in qkv.chunk(3, dim=2)
    )
    slopes = None if position_bias is None else position_bias[:, 0, -2] * -1.0  # the bias at distance one
    return module.out_proj(
        attend(module, q, k, v, None, scaling=module.softmax_scale, slopes=slopes)[0].flatten(2)
    ), None


@functools.cache
def falcon_biases(heads: int, positions: int, device: torch.device) -> Tensor:
    """ALiBi bias of each key position [heads, positions], rounded to bfloat16 as in Falcon."""
    from transformers.models.falcon.modeling_falcon import build_alibi_tensor

    biases: Tensor = build_alibi_tensor(torch.ones(1, positions, dtype=torch.int64), heads, torch.float32)
    return biases[:, 0].to(device)


def falcon_alibi(attend: Attend, module: Any, q: Tensor, k: Tensor, v: Tensor, positions: Tensor) -> Tensor:
    """Attention with the bias as an extra dimension of the keys; the query is 1 there.

    The score is (q·k + bias) · scale, as in SDPA.  This keeps the bfloat16 rounding of the bias, unlike ALiBi
    slopes.  Every query head has its own keys.
    """
    heads = module.num_heads
    k, v = (part.repeat_interleave(heads // part.shape[1], dim=1) for part in (k, v))
    biases = falcon_biases(heads, max(module.max_position_embeddings, SHORTEST), q.device)
    k = torch.cat([k, biases[None, :, positions[0].to(q.device), None].to(k.dtype)], dim=-1)
    q = torch.cat([q, torch.ones_like(q[..., :1])], dim=-1)
    return attend(module, q, k, v, None, scaling=module.inv_norm_factor, wide_keys=True)[0]


def falcon(
    attend: Attend,
    module: Any,
    x: Tensor,
    alibi: Any = None,
    position_ids: Any = None,
    position_embeddings: Any = None,
    **_: Any,
) -> tuple[Tensor, None]:
    from transformers.models.falcon import modeling_falcon as theirs

    q, k, v = (part.transpose(1, 2) for part in module._split_heads(module.query_key_value(x)))
    if alibi is not None:
        return module.dense(falcon_alibi(attend, module, q, k, v, position_ids).flatten(2)), None
    k, v = (part[:, :: part.shape[1] // module.num_kv_heads] for part in (k, v))  # one of several equal rows
    rotate: Any = theirs.apply_rotary_pos_emb
    q, k = rotate(q, k, *position_embeddings)
    return module.dense(
        attend(module, q, k, v, None, scaling=1.0 / math.sqrt(module.head_dim))[0].flatten(2)
    ), None


FAMILIES: dict[str, tuple[str, Callable[..., Any]]] = {
    "GPTJAttention": ("_attn", gptj),
    "CodeGenAttention": ("_attn", gptj),
    "GPTNeoSelfAttention": ("_attn", gpt_neo),
    "BloomAttention": ("forward", bloom),
    "MptAttention": ("forward", mpt),
    "FalconAttention": ("forward", falcon),
}


def route(model: nn.Module, attend: Attend) -> bool:
    """Patch a model of these families to use `attend`; returns False for all others."""
    found = [module for module in model.modules() if _needs_patch(module)]
    for module in found:
        name, function = FAMILIES[type(module).__name__]
        setattr(module, name, functools.partial(function, attend, module))
    return bool(found)


def _needs_patch(module: nn.Module) -> bool:
    """Whether a module is of these families, in a transformers whose code does not know the interface yet."""
    kind = type(module)
    return kind.__name__ in FAMILIES and not hasattr(sys.modules[kind.__module__], "ALL_ATTENTION_FUNCTIONS")
