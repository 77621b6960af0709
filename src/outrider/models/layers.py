"""Weights of the lean decoder's blocks, read from a checkpoint and packed for a backend."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from outrider.backends.base import Backend, DecoderLayer, Weight
from outrider.checkpoints.quantize import reduced
from outrider.checkpoints.spec import Spec
from outrider.checkpoints.weights import Source
from outrider.core.quantized import join


@dataclass(frozen=True)
class LayerReader:
    """Reader of a decoder's weights.  bits: of quantization while loading, None for the weights as stored."""

    weights: Source
    spec: Spec
    dtype: torch.dtype
    bits: int | None

    def layer(self, backend: Backend, i: int, at: str = "", inputs: int = 0) -> DecoderLayer:
        """at: prefix of its names, if they are not a model's.

        inputs: width of what `qkv` reads if it is not the normed states; then there is no norm_in.
        """
        s, at = self.spec, at or f"model.layers.{i}"
        q, kv = s.heads * s.head_dim, s.kv_heads * s.head_dim
        attention = [(f"{at}.self_attn.{name}_proj", size) for name, size in (("q", q), ("k", kv), ("v", kv))]
        mlp = [(f"{at}.mlp.{name}_proj", s.inner) for name in ("gate", "up")]
        q_norm, k_norm = (
            self._vector(backend, f"{at}.self_attn.{name}_norm", s.head_dim) if s.qk_norm else None
            for name in ("q", "k")
        )
        return DecoderLayer(
            norm_in=None if inputs else self._vector(backend, f"{at}.input_layernorm", s.hidden),
            qkv=self._fused(backend, attention, inputs or s.hidden, self.bits),
            o=self._fused(backend, [(f"{at}.self_attn.o_proj", s.hidden)], q, self.bits),
            norm_post=self._vector(backend, f"{at}.post_attention_layernorm", s.hidden),
            gate_up=self._fused(backend, mlp, s.hidden, self.bits),
            down=self._fused(backend, [(f"{at}.mlp.down_proj", s.hidden)], s.inner, self.bits),
            q_norm=q_norm,
            k_norm=k_norm,
            heads=s.heads,
            kv_heads=s.kv_heads,
            head_dim=s.head_dim,
            eps=s.eps,
            window=s.windows[i],
        )

    def embedding(self, backend: Backend) -> Weight:
        return self._outer(backend, "model.embed_tokens")

    def lm_head(self, backend: Backend) -> Weight:
        return self._outer(backend, "lm_head")

    def norm(self, backend: Backend) -> Tensor:
        return self._vector(backend, "model.norm", self.spec.hidden)

    def _outer(self, backend: Backend, name: str) -> Weight:
        bits = None if self.bits is None else 8
        return self._fused(backend, [(name, self.spec.vocabulary)], self.spec.hidden, bits)

    def _vector(self, backend: Backend, name: str, size: int) -> Tensor:
        return self.weights.get(f"{name}.weight", size).float().to(backend.device).contiguous()

    def _fused(
        self, backend: Backend, parts: Sequence[tuple[str, int]], inputs: int, bits: int | None
    ) -> Weight:
        return fused(self.weights, backend, parts, inputs, self.dtype, bits)


def fused(
    weights: Source,
    backend: Backend,
    parts: Sequence[tuple[str, int]],
    inputs: int,
    dtype: torch.dtype,
    bits: int | None,
) -> Weight:
    """Linears (name, outputs) of the same input as one, outputs concatenated, packed for a backend.

    Biases are used where the file has them; those that it lacks beside others are zero.
    """
    read = [reduced(weights.linear(name, size, inputs), bits) for name, size in parts]
    found = {name: weights.get(f"{name}.bias", n).float() for name, n in parts if f"{name}.bias" in weights}
    biases = [found.get(name, torch.zeros(size)) for name, size in parts]
    return backend.pack(join(read, dtype), torch.cat(biases) if found else None)
