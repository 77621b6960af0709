"""Parts of heads' networks in torch, for training and export.  Their modules have the published names.

A text is [n, hidden], without a batch dimension.  Masks are bool [n, keys], True where a row attends to a
key.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from outrider.checkpoints.spec import Facts
from outrider.core.ragged import Ragged
from outrider.heads.layer import Sizes

THETA = 10000.0  # of rotations


class ResidualBlock(nn.Module):
    """res(x) + silu(linear(x)); res is the identity, or a linear where the widths differ."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.linear = nn.Linear(inputs, outputs)
        self.res_connection = nn.Linear(inputs, outputs) if inputs != outputs else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        residual: Tensor = self.res_connection(x)
        return residual + F.silu(self.linear(x))


class GatedMlp(nn.Module):
    """down(silu(gate(x)) * up(x))."""

    def __init__(self, hidden: int, inner: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden, inner, bias=False)
        self.up_proj = nn.Linear(hidden, inner, bias=False)
        self.down_proj = nn.Linear(inner, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


def rotary_angles(positions: Tensor, head_dim: int, theta: float = THETA) -> Tensor:
    """[n, head_dim / 2] of the positions [n]."""
    return positions[:, None] * theta ** -(torch.arange(0, head_dim, 2, device=positions.device) / head_dim)


def rotate(x: Tensor, angles: Tensor) -> Tensor:
    """x [heads, n, head_dim] with the pairs (i, i + half) rotated by angles [n, head_dim / 2]."""
    a, b = x.chunk(2, dim=-1)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)


class Attention(nn.Module):
    """Grouped-query attention with rotary positions.  inputs: width of its input.  qk_norm: of every head."""

    def __init__(self, sizes: Sizes, inputs: int | None = None, qk_norm: bool = False) -> None:
        super().__init__()
        inputs, q, kv = inputs or sizes.hidden, sizes.heads * sizes.head_dim, sizes.kv_heads * sizes.head_dim
        self.head_dim = sizes.head_dim
        self.q_proj = nn.Linear(inputs, q, bias=False)
        self.k_proj = nn.Linear(inputs, kv, bias=False)
        self.v_proj = nn.Linear(inputs, kv, bias=False)
        self.o_proj = nn.Linear(q, sizes.hidden, bias=False)
        self.q_norm = nn.RMSNorm(sizes.head_dim, sizes.eps) if qk_norm else None
        self.k_norm = nn.RMSNorm(sizes.head_dim, sizes.eps) if qk_norm else None

    def queries(self, u: Tensor, angles: Tensor) -> Tensor:
        """[heads, n, head_dim] of u [n, inputs]."""
        q = self.split(self.q_proj(u))
        return rotate(q if self.q_norm is None else self.q_norm(q), angles)

    def keys(self, u: Tensor, angles: Tensor) -> Tensor:
        """[kv_heads, n, head_dim]."""
        return self.rotated_keys(self.k_proj(u), angles)

    def rotated_keys(self, projected: Tensor, angles: Tensor) -> Tensor:
        """[kv_heads, n, head_dim] of projections [n, kv_heads * head_dim]."""
        k = self.split(projected)
        return rotate(k if self.k_norm is None else self.k_norm(k), angles)

    def values(self, u: Tensor) -> Tensor:
        """[kv_heads, n, head_dim]."""
        return self.split(self.v_proj(u))

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        """[n, hidden]."""
        out = F.scaled_dot_product_attention(q[None], k[None], v[None], attn_mask=mask, enable_gqa=True)[0]
        projected: Tensor = self.o_proj(out.transpose(0, 1).flatten(1))
        return projected

    def forward(self, u: Tensor, angles: Tensor, mask: Tensor) -> Tensor:
        return self.attend(self.queries(u, angles), self.keys(u, angles), self.values(u), mask)

    def split(self, x: Tensor) -> Tensor:
        """[heads, n, head_dim] of x [n, heads * head_dim]."""
        return x.view(len(x), x.shape[1] // self.head_dim, self.head_dim).transpose(0, 1)


class Layer(nn.Module):
    """x += attend(norm(x)); x += mlp(norm(x)).  norm_in: whether the first norm is there.

    With an `inner` of 0 there is no MLP.
    """

    def __init__(
        self, sizes: Sizes, inputs: int | None = None, qk_norm: bool = False, norm_in: bool = True
    ) -> None:
        super().__init__()
        self.self_attn = Attention(sizes, inputs, qk_norm)
        self.input_layernorm = nn.RMSNorm(sizes.hidden, sizes.eps) if norm_in else nn.Identity()
        self.mlp: nn.Module | None = None
        if sizes.inner:
            self.mlp = GatedMlp(sizes.hidden, sizes.inner)
            self.post_attention_layernorm = nn.RMSNorm(sizes.hidden, sizes.eps)

    def forward(self, x: Tensor, angles: Tensor, mask: Tensor) -> Tensor:
        return self.feed_forward(x + self.self_attn(self.input_layernorm(x), angles, mask))

    def over_texts(self, x: Tensor, texts: Ragged | None = None) -> Tensor:
        """x [T, hidden] of one text, or of several, through the layer; positions of a text begin at 0."""
        attention, u = self.self_attn, self.input_layernorm(x)
        texts = texts or Ragged.of([len(x)], x.device)
        positions = torch.arange(texts.valid.shape[1], device=x.device).expand_as(texts.valid)
        angles = rotary_angles(texts.rows(positions), attention.head_dim)
        q, k = texts.pad(attention.queries(u, angles)), texts.pad(attention.keys(u, angles))
        v = texts.pad(attention.values(u))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.feed_forward(x + attention.o_proj(texts.join(out)))

    def feed_forward(self, x: Tensor) -> Tensor:
        return x if self.mlp is None else x + self.mlp(self.post_attention_layernorm(x))


def small_sizes(spec: Facts) -> Sizes:
    """Sizes of a layer that suits a target."""
    head_dim = min(spec.head_dim, 128)
    return Sizes(spec.hidden, 2 * spec.hidden, max(1, spec.hidden // head_dim), 1, head_dim, 1e-6)


def sizes_config(sizes: Sizes) -> dict[str, Any]:
    """The sizes and the rotation under the keys of a transformers config."""
    return {
        "hidden_size": sizes.hidden,
        "intermediate_size": sizes.inner,
        "num_attention_heads": sizes.heads,
        "num_key_value_heads": sizes.kv_heads,
        "head_dim": sizes.head_dim,
        "rms_norm_eps": sizes.eps,
        "rope_theta": THETA,
    }


def eagle_config(sizes: Sizes, vocabulary: int, bias: bool) -> dict[str, Any]:
    """The config of a head of one layer behind a `fc`, in the reference's form.  bias: of `fc`."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        **sizes_config(sizes),
        "num_hidden_layers": 1,
        "vocab_size": vocabulary,
        "bias": bias,
    }


def register_vocabulary(module: nn.Module, ids: Tensor, vocabulary: int) -> None:
    """Buffers of a head with the target's tokens `ids` [Vd], ascending: d2t [Vd], offsets, and t2d
    [vocabulary], flags."""
    module.register_buffer("d2t", ids - torch.arange(len(ids)))
    module.register_buffer("t2d", torch.zeros(vocabulary, dtype=torch.bool).index_fill(0, ids, True))


def soft_cross_entropy(logits: Tensor, target_logits: Tensor) -> Tensor:
    """[n]: cross entropy of every row with the target's distribution; logits [n, V] both."""
    return -(target_logits.softmax(-1) * logits.float().log_softmax(-1)).sum(-1)


def acceptance_loss(logits: Tensor, target_logits: Tensor) -> Tensor:
    """[n]: -log of the expected acceptance, sum of min(p, q), of every row (LK losses, arXiv 2602.23881).

    Computed from logarithms, so that rows almost without common tokens have a gradient too.  p and q are over
    the tokens of the given logits; for EAGLE-3 these are the head's.
    """
    p, q = target_logits.log_softmax(-1), logits.float().log_softmax(-1)
    return -torch.minimum(p, q).logsumexp(-1)
