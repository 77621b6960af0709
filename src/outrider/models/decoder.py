"""The lean decoder: Llama, Mistral, Qwen2 and Qwen3 as one class with flags.

Pre-norm blocks with fused projections; residual x.  Which rows see which keys is the plan's business, where K/V lies the
pool's, how it is computed the kernels': this file is the arithmetic of the model and nothing else.

    x = embed(ids);  per layer:  x += o(attend(rope(qkv(norm(x)))));  x += down(silu(gate) * up)(norm(x));  logits = head(norm(x))
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from outrider.attention.plan import Plan
from outrider.cache.pool import Pool, kv_dtype
from outrider.errors import ConfigError
from outrider.kernels import Chain, Kernels, Weight, kernels_for
from outrider.kernels.lora import Adapted
from outrider.kernels.quantised import Quantised, join
from outrider.models.hub import Checkpoint, Source
from outrider.models.quantise import bits_of, quantise
from outrider.models.spec import Spec


@dataclass
class Layer:
    """The weights of one block, and what `rope_store` must know of its heads."""

    norm_in: Tensor
    qkv: Weight  # [(heads + 2 kv_heads) head_dim, hidden]
    o: Weight
    norm_post: Tensor
    gate_up: Weight  # [2 inner, hidden]
    down: Weight
    q_norm: Tensor | None
    k_norm: Tensor | None
    heads: int
    kv_heads: int
    head_dim: int
    eps: float
    window: int


class Decoder:
    """Weights of one model on one device.  Has no state between calls: K/V lives in the pool that a call is given."""

    def __init__(
        self, checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device, max_len: int,
        quantization: str | None = None, kv_cache_dtype: str = "auto",
    ) -> None:  # fmt: skip
        self.spec = spec = checkpoint.spec
        self.dtype, self.device, self.max_len = dtype, device, max_len
        self.bits, self.kv_cache_dtype = bits_of(quantization), kv_cache_dtype
        self.kernels: Kernels = kernels_for(device, dtype)
        weights = checkpoint.tensors()
        self.turn = rotations(checkpoint.config, spec, max(max_len, 32)).to(device)  # the self-test computes 24 positions
        self.embedding = self._fused(weights, [("model.embed_tokens", spec.vocabulary)], spec.hidden, outer=True)
        self.layers = []
        for i in range(spec.layers):
            self.layers.append(self._layer(weights, i))
        self.stack = self.kernels.prepare(spec, self.layers, self.turn)
        self.norm = self._vector(weights, "model.norm", spec.hidden)
        self.lm_head = self.embedding
        if not spec.tied:
            self.lm_head = self._fused(weights, [("lm_head", spec.vocabulary)], spec.hidden, outer=True)

    def pool(self, slots: int) -> Pool:
        s = self.spec
        return Pool(s.layers, s.kv_heads, s.head_dim, slots, kv_dtype(self.kv_cache_dtype, self.dtype), self.device)

    @property
    def slot_bytes(self) -> int:
        s = self.spec
        return Pool.bytes_per_slot(s.layers, s.kv_heads, s.head_dim, kv_dtype(self.kv_cache_dtype, self.dtype))

    def forward(self, plan: Plan, pool: Pool) -> Tensor:
        """Residual stream after the last layer, [n, hidden] for the n rows of the plan; K/V of these rows is in the pool."""
        return self.kernels.run(self.stack, self.kernels.embed(self.embedding, plan), plan, pool, plan.adapted)

    def adapter(self, layers: Adapted) -> Any:
        """What `Plan.adapt` wants for a LoRA adapter that has been read."""
        return self.kernels.adapter(self.spec, layers)

    def logits(self, x: Tensor, rows: list[int]) -> Tensor:
        """float32 [len(rows), V] of some rows, in ascending order, of `forward`'s result."""
        chosen = x if len(rows) == x.shape[0] else x[rows]
        return self.kernels.linear(self.kernels.rms_norm(chosen, self.norm, self.spec.eps), self.lm_head).float()

    def chain(self, plan: Plan, pool: Pool, chains: Sequence[Chain], vocabulary: int) -> list[list[int]] | None:
        """`forward` over the plan, then a chain of the best tokens behind some of its rows; see `Kernels.chain`."""
        return self.kernels.chain(self.stack, self.embedding, self.norm, self.lm_head, plan, pool, chains, vocabulary)

    def _layer(self, weights: Source, i: int) -> Layer:
        s, at = self.spec, f"model.layers.{i}"
        q, kv = s.heads * s.head_dim, s.kv_heads * s.head_dim
        attention = [(f"{at}.self_attn.{name}_proj", size) for name, size in (("q", q), ("k", kv), ("v", kv))]
        mlp = [(f"{at}.mlp.{name}_proj", s.inner) for name in ("gate", "up")]
        return Layer(
            norm_in=self._vector(weights, f"{at}.input_layernorm", s.hidden),
            qkv=self._fused(weights, attention, s.hidden),
            o=self._linear(weights, f"{at}.self_attn.o_proj", s.hidden, q),
            norm_post=self._vector(weights, f"{at}.post_attention_layernorm", s.hidden),
            gate_up=self._fused(weights, mlp, s.hidden),
            down=self._linear(weights, f"{at}.mlp.down_proj", s.hidden, s.inner),
            q_norm=self._vector(weights, f"{at}.self_attn.q_norm", s.head_dim) if s.qk_norm else None,
            k_norm=self._vector(weights, f"{at}.self_attn.k_norm", s.head_dim) if s.qk_norm else None,
            heads=s.heads, kv_heads=s.kv_heads, head_dim=s.head_dim, eps=s.eps, window=s.windows[i],
        )  # fmt: skip

    def _vector(self, weights: Source, name: str, size: int) -> Tensor:
        return weights.get(f"{name}.weight", size).float().to(self.device).contiguous()

    def _linear(self, weights: Source, name: str, outputs: int, inputs: int) -> Weight:
        return self._fused(weights, [(name, outputs)], inputs)

    def _fused(self, weights: Source, parts: list[tuple[str, int]], inputs: int, outer: bool = False) -> Weight:
        """Several linears of the same input as one, their outputs side by side; a bias counts where the file has one."""
        read = [self._few(weights.linear(name, size, inputs), name, outer) for name, size in parts]
        biased = any(f"{name}.bias" in weights for name, _ in parts)
        bias = torch.cat([weights.get(f"{name}.bias", size).float() for name, size in parts]) if biased else None
        return self.kernels.pack(join(read, self.dtype), bias)

    def _few(self, weight: Tensor | Quantised, name: str, outer: bool) -> Tensor | Quantised:
        """The weight in the bits that were asked for; `outer`: the embedding or the head."""
        if self.bits is None:
            return weight
        if isinstance(weight, Quantised):
            raise ConfigError(f"the checkpoint is quantised already ({name} to {weight.bits} bits): leave quantization out.")
        return quantise(weight, 8 if outer else self.bits)


def rotations(config: Any, spec: Spec, max_len: int) -> Tensor:
    """float32 [max_len, head_dim]: cos, then sin, of the first half of the head; every scaling that transformers knows.

    A scaling that depends on the length (longrope) is taken for `max_len`, as in vLLM; transformers switches as a text grows.
    """
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    try:
        rotary = LlamaRotaryEmbedding(config)
    except KeyError as error:
        raise ConfigError(f"the model's rope type {error} is unknown to transformers.") from error
    cos, sin = rotary(torch.empty(0), torch.arange(max_len)[None])
    half = cos.shape[-1] // 2
    return torch.cat([cos[0, :, :half], sin[0, :, :half]], dim=-1).contiguous()
