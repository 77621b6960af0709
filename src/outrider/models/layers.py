"""Weights of the lean decoder's blocks, read from a checkpoint and packed for a backend."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from outrider.backends.base import Backend, DecoderLayer, Weight
from outrider.checkpoints.quantize import reduced
from outrider.checkpoints.spec import Spec
from outrider.checkpoints.weights import Source
from outrider.core.quantized import join


class LayerSource(NamedTuple):
    """A layer in a file, as `LayerReader.layer` takes it.  prefix: of the names of its tensors.

    inputs: width of what `qkv` reads if the caller gives that, and the layer has no input norm; otherwise 0
    """

    prefix: str
    inputs: int = 0


@dataclass(frozen=True)
class LayerReader:
    """Reader of a decoder's weights.  bits: of quantization while loading, None for the weights as stored."""

    weights: Source
    spec: Spec
    dtype: torch.dtype
    bits: int | None

    def layer(self, backend: Backend, i: int, prefix: str = "", inputs: int = 0) -> DecoderLayer:
        """Layer i, packed.  prefix, inputs: see `LayerSource`; without a prefix a model's layer.

        With an `inner` of 0 it has no MLP.
        """
        spec, prefix = self.spec, prefix or f"model.layers.{i}"
        attention, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"
        q, kv = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
        qkv = [(f"{attention}.q_proj", q), (f"{attention}.k_proj", kv), (f"{attention}.v_proj", kv)]
        q_norm = k_norm = norm_in = norm_post = gate_up = down = None
        if spec.qk_norm:
            q_norm = self._vector(backend, f"{attention}.q_norm", spec.head_dim)
            k_norm = self._vector(backend, f"{attention}.k_norm", spec.head_dim)
        if not inputs:
            norm_in = self._vector(backend, f"{prefix}.input_layernorm", spec.hidden)
        if spec.inner:
            halves = [(f"{mlp}.gate_proj", spec.inner), (f"{mlp}.up_proj", spec.inner)]
            norm_post = self._vector(backend, f"{prefix}.post_attention_layernorm", spec.hidden)
            gate_up = self._fused(backend, halves, spec.hidden, self.bits)
            down = self._fused(backend, [(f"{mlp}.down_proj", spec.hidden)], spec.inner, self.bits)
        return DecoderLayer(
            norm_in=norm_in,
            qkv=self._fused(backend, qkv, inputs or spec.hidden, self.bits),
            o=self._fused(backend, [(f"{attention}.o_proj", spec.hidden)], q, self.bits),
            norm_post=norm_post,
            gate_up=gate_up,
            down=down,
            q_norm=q_norm,
            k_norm=k_norm,
            heads=spec.heads,
            kv_heads=spec.kv_heads,
            head_dim=spec.head_dim,
            eps=spec.eps,
            window=spec.windows[i],
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
