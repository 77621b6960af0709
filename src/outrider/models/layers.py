"""Weights of the lean decoder's blocks, read from a checkpoint and packed for a backend."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from outrider.backends.base import Backend, DecoderLayer, LayerExperts, Weight
from outrider.checkpoints.quantize import reduced
from outrider.checkpoints.spec import Experts, Spec
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
        """Layer i, packed.  prefix, inputs: see `LayerSource`; without a prefix a model's layer."""
        spec, prefix = self.spec, prefix or f"model.layers.{i}"
        attention, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"
        q, kv = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
        qkv = [(f"{attention}.q_proj", q), (f"{attention}.k_proj", kv), (f"{attention}.v_proj", kv)]
        q_norm = k_norm = norm_in = norm_attended = norm_mlp = None
        norm_post, traits = "post_attention_layernorm", spec.traits
        if traits.output_norms:
            norm_attended = self._vector(backend, f"{prefix}.{norm_post}", spec.hidden)
            norm_mlp = self._vector(backend, f"{prefix}.post_feedforward_layernorm", spec.hidden)
            norm_post = "pre_feedforward_layernorm"
        if spec.qk_norm:
            q_norm = self._vector(backend, f"{attention}.q_norm", spec.head_dim)
            k_norm = self._vector(backend, f"{attention}.k_norm", spec.head_dim)
        if not inputs:
            norm_in = self._vector(backend, f"{prefix}.input_layernorm", spec.hidden)
        experts = gate_up = down = None
        if spec.experts is not None and spec.experts.layers[i]:
            experts = self._experts(backend, mlp, spec.experts)
        else:
            gate_up, down = self._mlp(backend, mlp, spec.inner)
        return DecoderLayer(
            norm_in=norm_in,
            qkv=self._fused(backend, qkv, inputs or spec.hidden, self.bits),
            o=self._fused(backend, [(f"{attention}.o_proj", spec.hidden)], q, self.bits),
            norm_post=self._vector(backend, f"{prefix}.{norm_post}", spec.hidden),
            gate_up=gate_up,
            down=down,
            q_norm=q_norm,
            k_norm=k_norm,
            heads=spec.heads,
            kv_heads=spec.kv_heads,
            head_dim=spec.head_dim,
            eps=spec.eps,
            window=spec.windows[i],
            scale=(traits.query_scalar or spec.head_dim) ** -0.5,
            experts=experts,
            norm_attended=norm_attended,
            norm_mlp=norm_mlp,
            cap=traits.score_cap,
            gelu=traits.gelu,
        )

    def _mlp(self, backend: Backend, mlp: str, inner: int) -> tuple[Weight, Weight]:
        """gate_up and down of a gated MLP."""
        gate_up = [(f"{mlp}.gate_proj", inner), (f"{mlp}.up_proj", inner)]
        return (
            self._fused(backend, gate_up, self.spec.hidden, self.bits),
            self._fused(backend, [(f"{mlp}.down_proj", self.spec.hidden)], inner, self.bits),
        )

    def _experts(self, backend: Backend, mlp: str, experts: Experts) -> LayerExperts:
        """The router keeps its bits: it is small, and a wrong choice costs more than a rounded weight."""
        router = self._fused(backend, [(f"{mlp}.gate", experts.count)], self.spec.hidden, None)
        mlps = [self._mlp(backend, f"{mlp}.experts.{e}", experts.inner) for e in range(experts.count)]
        gate_up, down = [gate_up for gate_up, _ in mlps], [down for _, down in mlps]
        return LayerExperts(router, gate_up, down, experts.chosen, experts.normalized)

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
        weight = self.weights.get(f"{name}.weight", size).float()
        weight = 1.0 + weight if self.spec.traits.unit_norms else weight
        return weight.to(backend.device).contiguous()

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
