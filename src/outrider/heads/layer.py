"""One transformer block of a head, on the target's kernels: its attention may read something wider than the residual stream."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from outrider.attention.plan import Plan
from outrider.cache.pool import Pool, kv_dtype
from outrider.errors import ModelError
from outrider.heads.files import Head, Reader
from outrider.kernels import Kernels
from outrider.models.decoder import rotations
from outrider.models.model import Model


@dataclass(frozen=True)
class Sizes:
    """Of a block, by its tensors; the config only says what these cannot."""

    hidden: int
    inner: int
    heads: int
    kv_heads: int
    head_dim: int
    eps: float

    @staticmethod
    def of(head: Head, at: str, hidden: int) -> Sizes:
        """at: what the names of the block begin with, such as "layers.0".  Raises ModelError where the heads do not divide."""
        config, q, kv = head.config, head.shape(f"{at}.self_attn.q_proj.weight")[0], head.shape(f"{at}.self_attn.k_proj.weight")[0]
        heads = config.get("num_attention_heads")
        width = config.get("head_dim") or (q // heads if heads else 0)
        if not width or q % width or kv % width or (q // width) % (kv // width):
            raise ModelError(
                f"{head.name!r}: {at} has {q} outputs for queries and {kv} for keys, which are no heads of "
                f"head_dim {config.get('head_dim')} (num_attention_heads {heads})."
            )
        inner = head.shape(f"{at}.mlp.gate_proj.weight")[0]
        return Sizes(hidden, inner, q // width, kv // width, width, float(config.get("rms_norm_eps") or 1e-6))

    def pool(self, layers: int, slots: int, model: Model) -> Pool:
        return Pool(layers, self.kv_heads, self.head_dim, slots, kv_dtype(model.kv_cache_dtype, model.dtype), model.kernels.device)

    def slot_bytes(self, layers: int, model: Model) -> int:
        return Pool.bytes_per_slot(layers, self.kv_heads, self.head_dim, kv_dtype(model.kv_cache_dtype, model.dtype))


def turn_of(config: Mapping[str, Any], sizes: Sizes, positions: int) -> Tensor:
    """cos and sin as `rope_store` wants them, [positions, head_dim].  A head has its own theta: 10000 unless its config says another."""
    from transformers import LlamaConfig

    known = {key: config[key] for key in ("rope_theta", "rope_scaling", "rope_parameters", "max_position_embeddings") if config.get(key)}
    made = LlamaConfig(
        hidden_size=sizes.heads * sizes.head_dim, num_attention_heads=sizes.heads, num_key_value_heads=sizes.kv_heads,
        head_dim=sizes.head_dim, **known,
    )  # fmt: skip
    return rotations(made, max(positions, 32))


class Block:
    """x = residual + o(attend(qkv(u)));  x += down(silu(gate) * up)(norm(x)).  What u is, and which norm it went through, is the
    method's business.  window: of its attention, in tokens, 0 for all."""

    def __init__(self, reader: Reader, at: str, sizes: Sizes, inputs: int, turn: Tensor, window: int = 0) -> None:
        """inputs: width of u.  Raises ModelError for a config whose layers have another activation."""
        act = reader.head.config.get("hidden_act") or reader.head.config.get("hidden_activation") or "silu"
        if act not in ("silu", "swish"):
            raise ModelError(f"{reader.head.name!r} has hidden_act {act!r}; the layers of heads are supported with 'silu' only.")
        self.kernels: Kernels = reader.kernels
        self.heads, self.kv_heads, self.head_dim, self.eps = sizes.heads, sizes.kv_heads, sizes.head_dim, sizes.eps
        self.turn, self.window = turn.to(self.kernels.device), window
        q, kv = sizes.heads * sizes.head_dim, sizes.kv_heads * sizes.head_dim
        normed = f"{at}.self_attn.q_norm.weight" in reader.head
        self.q_norm = reader.vector(f"{at}.self_attn.q_norm.weight", sizes.head_dim) if normed else None
        self.k_norm = reader.vector(f"{at}.self_attn.k_norm.weight", sizes.head_dim) if normed else None
        self.qkv = reader.fused([(f"{at}.self_attn.{name}_proj", size) for name, size in (("q", q), ("k", kv), ("v", kv))], inputs)
        self.o = reader.linear(f"{at}.self_attn.o_proj", sizes.hidden, q)
        self.norm_post = reader.vector(f"{at}.post_attention_layernorm.weight", sizes.hidden)
        self.gate_up = reader.fused([(f"{at}.mlp.{name}_proj", sizes.inner) for name in ("gate", "up")], sizes.hidden)
        self.down = reader.linear(f"{at}.mlp.down_proj", sizes.hidden, sizes.inner)
        self.hidden, self.inner, self.norm_in = sizes.hidden, sizes.inner, self.norm_post
        layer: Any = self  # as `run` takes one; its attention, which knows one input only, is skipped
        self.mlp = self.kernels.without(self.kernels.prepare(layer, [layer], self.turn), [1])

    def __call__(self, u: Tensor, residual: Tensor, plan: Plan, pool: Pool, at: int = 0) -> Tensor:
        """u [n, inputs], residual [n, hidden] (which it changes and returns) for the rows of the plan; K/V goes to layer `at`."""
        run = self.kernels
        q = run.rope_store(run.linear(u, self.qkv), self, self.turn, plan, pool, at)
        out = run.attend(q, self, plan, pool, at, self.head_dim**-0.5, self.window)
        x = run.linear(out.to(u.dtype), self.o, residual)
        return run.run(self.mlp, x, plan, pool)
