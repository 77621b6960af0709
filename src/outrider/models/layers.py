"""Weights of the lean decoder's blocks, read from a checkpoint and packed for a backend."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from outrider.backends.base import Backend, Weight
from outrider.backends.layer import DecoderLayer, LayerDelta, LayerExperts
from outrider.checkpoints.delta_rule import DeltaRule
from outrider.checkpoints.quantize import reduced
from outrider.checkpoints.spec import Experts, Spec
from outrider.checkpoints.weights import Source
from outrider.core.quantized import QuantizedWeight, join

NO_ORDER: Mapping[str, Tensor] = {}
NORMS = ("norm_in", "norm_post", "norm_attended", "norm_mlp", "q_norm", "k_norm")


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
        recurrent = spec.recurrent is not None and spec.recurrent.layers[i]
        experts = gate_up = down = shared_gate = None
        if spec.experts is not None and spec.experts.layers[i]:
            experts = self._experts(backend, mlp, spec.experts)
            if shared := spec.experts.shared:
                gate_up, down = self._mlp(backend, f"{mlp}.shared_expert", shared)
                shared_gate = self._fused(backend, [(f"{mlp}.shared_expert_gate", 1)], spec.hidden, None)
        elif spec.inner:
            gate_up, down = self._mlp(backend, mlp, spec.inner)
        return DecoderLayer(
            **self._norms(backend, prefix, "" if recurrent else attention, not inputs),
            **(self._delta(backend, prefix) if recurrent else self._attention(backend, attention, inputs)),
            gate_up=gate_up,
            down=down,
            heads=spec.heads,
            kv_heads=spec.kv_heads,
            head_dim=spec.head_dim,
            eps=spec.eps,
            window=spec.windows[i],
            scale=(spec.variant.query_scalar or spec.head_dim) ** -0.5,
            experts=experts,
            shared_gate=shared_gate,
            cap=spec.variant.score_cap,
            gelu=spec.variant.gelu,
        )

    def _attention(self, backend: Backend, attention: str, inputs: int) -> dict[str, Any]:
        """The linears of an attention, and its sinks."""
        spec, order = self.spec, NO_ORDER
        q, kv, wide = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim, inputs or spec.hidden
        name, query_gate = f"{attention}.q_proj", None
        if spec.variant.query_gates:  # the file has the outputs of each head, then those of its gate
            both = torch.arange(2 * q).view(spec.heads, 2, spec.head_dim)
            order = {name: both[:, 0].flatten()}
            gate = {name: both[:, 1].flatten()}
            query_gate = self._fused(backend, [(name, 2 * q)], wide, self.bits, gate)
        qkv = [(name, 2 * q if order else q), (f"{attention}.k_proj", kv), (f"{attention}.v_proj", kv)]
        return {
            "qkv": self._fused(backend, qkv, wide, self.bits, order),
            "o": self._fused(backend, [(f"{attention}.o_proj", spec.hidden)], q, self.bits),
            "query_gate": query_gate,
            "sinks": self._sinks(backend, attention) if spec.variant.sinks else None,
        }

    def _delta(self, backend: Backend, prefix: str) -> dict[str, Any]:
        """A gated delta rule.  The weights of its gates keep their bits, as those of routers."""
        rule, at = self.spec.recurrent, f"{prefix}.linear_attn"
        assert isinstance(rule, DeltaRule)
        hidden, values, channels = self.spec.hidden, rule.heads * rule.dim, rule.channels
        qkvz = [(f"{at}.in_proj_qkv", channels), (f"{at}.in_proj_z", values)]
        gates, order = [(f"{at}.in_proj_b", rule.heads), (f"{at}.in_proj_a", rule.heads)], NO_ORDER
        if rule.by_key_head:
            joined, gates = (f"{at}.in_proj_qkvz", channels + values), [(f"{at}.in_proj_ba", 2 * rule.heads)]
            order = dict(zip((joined[0], gates[0][0]), _key_head_orders(rule)))
            if f"{at}.in_proj_qkv.weight" not in self.weights:  # GGUF files have q, k, v and z in order
                qkvz = [joined]

        def vector(name: str, *shape: int) -> Tensor:
            return self.weights.get(f"{at}.{name}", *shape).float().to(backend.device)

        in_gguf = f"{at}.A" in self.weights
        rates = vector("A", rule.heads) if in_gguf else -vector("A_log", rule.heads).exp()
        delta = LayerDelta(
            self._fused(backend, qkvz, hidden, self.bits, order),
            self._fused(backend, gates, hidden, None, order),
            taps=vector("conv1d.weight", channels, 1, rule.taps)[:, 0].T.contiguous(),
            bias=vector("dt_bias", rule.heads).contiguous(),
            rates=rates,
            norm=vector("norm.weight", rule.dim).repeat(rule.heads),
            key_heads=rule.key_heads,
            heads=rule.heads,
            key_dim=rule.key_dim,
            dim=rule.dim,
            eps=self.spec.eps,
        )
        out = [(f"{at}.out_proj", hidden)]
        return {"qkv": None, "o": self._fused(backend, out, values, self.bits), "delta": delta}

    def _norms(self, backend: Backend, prefix: str, attention: str, has_input: bool) -> dict[str, Any]:
        """The norms of a layer by their names in `DecoderLayer`, None for those that it has not.

        attention: prefix of its attention, empty if it has none
        """
        spec = self.spec
        names: dict[str, str | None] = dict.fromkeys(NORMS)
        if has_input:
            names["norm_in"] = f"{prefix}.input_layernorm"
        if spec.inner:
            names["norm_post"] = f"{prefix}.post_attention_layernorm"
        if spec.variant.output_norms:
            names["norm_attended"] = f"{prefix}.post_attention_layernorm"
            names["norm_post"] = f"{prefix}.pre_feedforward_layernorm"
            names["norm_mlp"] = f"{prefix}.post_feedforward_layernorm"
        if spec.qk_norm and attention:
            names |= {"q_norm": f"{attention}.q_norm", "k_norm": f"{attention}.k_norm"}
        sizes = {"q_norm": spec.head_dim, "k_norm": spec.head_dim}
        return {
            norm: None if name is None else self._vector(backend, name, sizes.get(norm, spec.hidden))
            for norm, name in names.items()
        }

    def _sinks(self, backend: Backend, attention: str) -> Tensor:
        sinks = self.weights.get(f"{attention}.sinks", self.spec.heads)
        return sinks.float().to(backend.device).contiguous()

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
        slope, limit = self.spec.variant.gate_slope, self.spec.variant.gate_limit
        chosen, normalized = experts.chosen, experts.normalized
        return backend.pack_experts(LayerExperts(router, gate_up, down, chosen, normalized, slope, limit))

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
        weight = 1.0 + weight if self.spec.variant.unit_norms else weight
        return weight.to(backend.device).contiguous()

    def _fused(
        self,
        backend: Backend,
        parts: Sequence[tuple[str, int]],
        inputs: int,
        bits: int | None,
        order: Mapping[str, Tensor] = NO_ORDER,
    ) -> Weight:
        return fused(self.weights, backend, parts, inputs, self.dtype, bits, order)


def fused(
    weights: Source,
    backend: Backend,
    parts: Sequence[tuple[str, int]],
    inputs: int,
    dtype: torch.dtype,
    bits: int | None,
    order: Mapping[str, Tensor] = NO_ORDER,
) -> Weight:
    """Linears (name, outputs) of the same input as one, outputs concatenated, packed for a backend.

    Biases are used where the file has them; those that it lacks beside others are zero.
    order: name -> numbers of the outputs that are used of it, in their order
    """
    read, biases, found = list[Tensor | QuantizedWeight](), list[Tensor](), False
    for name, size in parts:
        weight, bias = weights.linear(name, size, inputs), torch.zeros(size)
        if f"{name}.bias" in weights:
            bias, found = weights.get(f"{name}.bias", size).float(), True
        if (rows := order.get(name)) is not None:
            weight, bias = _outputs(weight, rows), bias[rows]
        read.append(reduced(weight, bits))
        biases.append(bias)
    return backend.pack(join(read, dtype), torch.cat(biases) if found else None)


def _key_head_orders(rule: DeltaRule) -> tuple[Tensor, Tensor]:
    """Where files by head of keys have the outputs of q, k, v and z, and those of the gates b and a."""
    groups, values = rule.key_heads, rule.heads // rule.key_heads * rule.dim
    sizes = [rule.key_dim, rule.key_dim, values, values]
    qkvz = torch.split(torch.arange(groups * sum(sizes)).view(groups, -1), sizes, dim=1)
    gates = torch.arange(2 * rule.heads).view(groups, 2, -1)
    return torch.cat([part.flatten() for part in qkvz]), gates.transpose(0, 1).flatten()


def _outputs(weight: Tensor | QuantizedWeight, rows: Tensor) -> Tensor | QuantizedWeight:
    if isinstance(weight, QuantizedWeight):
        return weight.mapped(lambda part: part[rows])
    return weight[rows]
