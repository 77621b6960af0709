"""The operations of a backend in torch: any device, and the CPU without a compiler.

On a CPU the linears are oneDNN's packed ones, never called with one row.  From two rows on, their results
do not depend on the number of rows (docs/log.md, "Linears").  Attention sums in float64 on a CPU (see
attention.py), in float32 elsewhere.  A quantized weight keeps its bits.  On a CPU the first `MOST_WIDENED`
bytes stay widened after their first use; others are widened at every use, which saves memory and is slow.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from outrider.backends import candidates, rules
from outrider.backends.base import (
    Backend,
    FusedModel,
    LayerKV,
    ModelShape,
    Norms,
    ScoreModifier,
    Scores,
    TopNext,
)
from outrider.backends.launch import AttentionShape, Call, Launched, launched
from outrider.backends.layer import DecoderLayer, LayerExperts, places
from outrider.backends.torch import attention, delta, mixture, sampling
from outrider.backends.torch.attention import Group
from outrider.backends.torch.recurrence import TorchRecurrence
from outrider.backends.torch.verifier import TreeVerifier
from outrider.core import lora
from outrider.core import stop_rule as stop_rules
from outrider.core.lora import Adapted, LayerSizes, Runs
from outrider.core.params import DistributionParams
from outrider.core.quantized import QuantizedWeight
from outrider.core.step_input import StepInput
from outrider.core.stop_rule import NodeFeatures, StopRule

MOST_WIDENED = 2 << 30  # bytes of quantized weights of a backend: a billion weights in bfloat16


@dataclass
class TorchWeight:
    data: Tensor | QuantizedWeight  # [O, K]
    packed: Tensor | None  # in oneDNN's own layout, bfloat16 or float32; of a quantized weight, once widened
    bias: Tensor | None
    inputs: int
    outputs: int


@dataclass
class Stack:
    layers: Sequence[DecoderLayer]
    rotations: Tensor
    skips: Sequence[int]  # of every layer: 1 the attention, 2 the MLP
    places: Sequence[int]  # see `places`


def leave_out_amx() -> None:
    """Have oneDNN leave out AMX, with which a row's bits depend on the number of rows.

    oneDNN reads this when it is first used in a process.  A value of the user's stays.
    """
    os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")


def _onednn_has_bfloat16() -> bool:
    """Whether this processor has the AVX-512 instructions that oneDNN's bfloat16 linears need."""
    supported: bool = torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return supported


# of every layer and fused linear: outputs, a^T, scale * b^T
Adapter = list[dict[str, list[tuple[slice, Tensor, Tensor]]]]


class TorchBackend:
    """`Backend` without its optional parts."""

    fused: FusedModel | None = None
    distributions = None

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self.device, self.dtype = device, dtype
        self.activations = dtype
        # a CPU picks along the path only
        self.verifier: rules.TreeVerifier | None = None if device.type == "cpu" else TreeVerifier()
        onednn: bool = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
        self.onednn = onednn and device.type == "cpu" and dtype in (torch.float32, torch.bfloat16)
        self.exact = self.onednn
        # Without its bfloat16 kernels, oneDNN computes the linears in float32 on widened weights.
        self.linear_dtype = dtype if self.onednn and _onednn_has_bfloat16() else torch.float32
        mps = device.type == "mps"  # has no float64
        self.pick_next = None if mps else self._pick_next
        self.top_next: TopNext | None = None if mps else sampling.TopNext()
        self.recurrence = TorchRecurrence()
        self.wide = torch.float64 if device.type == "cpu" else torch.float32
        self.widened = 0  # bytes of quantized weights
        self.name = f"torch on {device} ({str(dtype).removeprefix('torch.')})"

    def pack(self, weight: Tensor | QuantizedWeight, bias: Tensor | None = None) -> TorchWeight:
        bias = None if bias is None else bias.to(self.device, self.dtype)
        if isinstance(weight, QuantizedWeight):
            outputs, inputs = weight.values.shape
            moved = weight.mapped(lambda part: part.to(self.device))
            return TorchWeight(moved, None, bias, inputs, outputs)
        data = weight.to(self.device, self.dtype).contiguous()
        return TorchWeight(data, self._packed(data), bias, weight.shape[1], weight.shape[0])

    def pack_experts(self, experts: LayerExperts) -> LayerExperts:
        return experts

    def _packed(self, data: Tensor) -> Tensor | None:
        if not self.onednn:
            return None
        packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(data.to(self.linear_dtype))
        return packed

    def linear(self, x: Tensor, weight: TorchWeight, add: Tensor | None = None) -> Tensor:
        packed = weight.packed
        if packed is None:
            data = self._dense(weight.data)
            packed = self._packed(data)
            self._keep(weight, packed)
        if packed is None:
            y = F.linear(x, data, weight.bias)
        else:
            alone = x.shape[0] == 1
            rows = F.pad(x, (0, 0, 0, 1)) if alone else x  # the two-row rule
            rows = rows.to(self.linear_dtype).contiguous()
            bias = None if weight.bias is None else weight.bias.to(self.linear_dtype)
            y = torch.ops.mkldnn._linear_pointwise(rows, packed, bias, "none", [], "").to(self.dtype)
            y = y[:1] if alone else y
        return y if add is None else add.add_(y)

    def _dense(self, data: Tensor | QuantizedWeight) -> Tensor:
        return data.dense().to(self.dtype) if isinstance(data, QuantizedWeight) else data

    def _keep(self, weight: TorchWeight, packed: Tensor | None) -> None:
        """Keep a widened weight, if there is room."""
        size = weight.inputs * weight.outputs * self.linear_dtype.itemsize
        if packed is not None and self.widened + size <= MOST_WIDENED:
            weight.packed, self.widened = packed, self.widened + size
            weakref.finalize(weight, self._forget, size)

    def _forget(self, size: int) -> None:
        self.widened -= size

    def launch(self, method: Launched, call: Call) -> Tensor:
        return launched(method, call)

    def embed(self, weight: TorchWeight, step_input: StepInput) -> Tensor:
        ids = step_input.on(self.device).input_ids
        if isinstance(weight.data, QuantizedWeight):
            return weight.data.mapped(lambda part: part[ids]).dense().to(self.dtype)
        return F.embedding(ids, weight.data)

    def pair(self, weight: TorchWeight, step_input: StepInput, g: Tensor, norms: Norms) -> Tensor:
        return beside(self, self.embed(weight, step_input).to(g.dtype), g, norms)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide = x.float()
        return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype) * weight.to(x)

    def add_normed(self, x: Tensor, y: Tensor, weight: Tensor, eps: float) -> Tensor:
        """x plus the norm of y, in place."""
        return x.add_(self.rms_norm(y, weight, eps))

    def silu_mul(self, x: Tensor) -> Tensor:
        gate, up = x.chunk(2, dim=-1)
        return F.silu(gate) * up

    def gelu_mul(self, x: Tensor) -> Tensor:
        """Row by row: torch computes the last elements of a call in another way."""
        gate, up = x.chunk(2, dim=-1)
        return torch.stack([F.gelu(row, approximate="tanh") for row in gate]) * up if len(x) else up

    def soft_cap(self, x: Tensor, cap: float) -> Tensor:
        return torch.stack([torch.tanh(row / cap) for row in x]) * cap if len(x) else x

    def prepare(self, step_input: StepInput) -> list[Group]:
        key = (attention.prepare, self.device)
        return step_input.derived(key, lambda step: attention.prepare(step, self.device))

    def rope_store(self, qkv: Tensor, spec: AttentionShape, rotations: Tensor, kv: LayerKV) -> Tensor:
        n, d, step = qkv.shape[0], spec.head_dim, kv.step_input.on(self.device)
        q, k, v = torch.split(qkv.view(n, -1, d), [spec.heads, spec.kv_heads, spec.kv_heads], dim=1)
        if spec.q_norm is not None and spec.k_norm is not None:
            q, k = self.rms_norm(q, spec.q_norm, spec.eps), self.rms_norm(k, spec.k_norm, spec.eps)
        cos, sin = rotations.to(self.device)[step.positions][:, None].chunk(2, dim=-1)
        kv.pool.write(kv.layer, 0, step.slot_mapping, _rotate(k, cos, sin))
        kv.pool.write(kv.layer, 1, step.slot_mapping, v)
        return _rotate(q, cos, sin).to(qkv.dtype)

    def attend(self, q: Tensor, spec: AttentionShape, kv: LayerKV, scores: Scores) -> Tensor:
        return attention.attend(self.prepare(kv.step_input), q, spec, kv, scores, self.wide)

    def pack_layers(self, spec: ModelShape, layers: Sequence[DecoderLayer], rotations: Tensor) -> Stack:
        return Stack(layers, rotations, [0] * len(layers), places(layers))

    def skip_sublayers(self, stack: Stack, skips: Sequence[int]) -> Stack:
        return Stack(stack.layers, stack.rotations, skips, stack.places)

    def pack_adapter(self, spec: LayerSizes, layers: Adapted) -> Adapter:
        places, packed = lora.places(spec), Adapter()
        for layer in layers:
            packed.append({fused: [] for fused in lora.FUSED})
            for fused, names in lora.FUSED.items():
                for name in names:
                    if (low := layer.get(name)) is not None:
                        start, outputs = places[name].start, places[name].outputs
                        a, b = low.a.to(self.device, self.wide), low.b.to(self.device, self.wide)
                        packed[-1][fused].append((slice(start, start + outputs), a.T, b.T * low.scale))
        return packed

    def run_layers(
        self, stack: Stack, x: Tensor, kv: LayerKV, runs: Runs = (), u: Tensor | None = None
    ) -> Tensor:
        for i, (block, skip) in enumerate(zip(stack.layers, stack.skips)):
            linear, own = _AdaptedLayer(self, block, i, runs), kv._replace(layer=kv.layer + stack.places[i])
            given = None if i else u
            if not skip & 1:
                seen = self.rms_norm(x, block.norm_in, block.eps) if given is None else given
                if block.delta is None:
                    found = self._attended(seen, linear, stack.rotations, own)
                else:
                    found = delta.outputs(self, seen, block.delta, own)
                x, given = self._add(x, linear, "o", found, block.norm_attended), None
            if not skip & 2:
                seen = self.rms_norm(x, block.norm_post, block.eps) if given is None else given
                if block.experts is not None:
                    x = self.add_mixture(x, seen, block.experts)
                if block.shared_gate is not None:
                    inner, share = (
                        self.silu_mul(linear("gate_up", seen)),
                        self.linear(seen, block.shared_gate),
                    )
                    x = linear("down", inner * self.recurrence.sigmoid(share).to(inner), add=x)
                elif block.experts is None:
                    act = self.gelu_mul if block.gelu else self.silu_mul
                    x = self._add(x, linear, "down", act(linear("gate_up", seen)), block.norm_mlp)
        return x

    def _attended(self, u: Tensor, linear: _AdaptedLayer, rotations: Tensor, kv: LayerKV) -> Tensor:
        """Attention output [n, H·D] of its input u."""
        block = linear.layer
        rotations = rotations if block.rotations is None else block.rotations
        q = self.rope_store(linear("qkv", u), block, rotations, kv)
        plain = not block.cap and block.sinks is None
        modifier = None if plain else ScoreModifier(block.cap, sinks=block.sinks)
        found = self.attend(q, block, kv, Scores(block.scale, block.window, modifier))
        if block.query_gate is None:
            return found
        return self.recurrence.gate(found, self.linear(u, block.query_gate), "sigmoid")

    def _add(self, x: Tensor, linear: _AdaptedLayer, name: str, found: Tensor, norm: Tensor | None) -> Tensor:
        """x plus a linear, or plus its norm."""
        if norm is None:
            return linear(name, found, add=x)
        return self.add_normed(x, linear(name, found), norm, linear.layer.eps)

    def add_mixture(self, x: Tensor, u: Tensor, experts: LayerExperts) -> Tensor:
        """x plus the weighted sum of every row's experts of u, in place."""
        return x.add_(mixture.outputs(self, u, experts))

    def should_stop(
        self, stop_rule: StopRule, logits: Tensor, temperature: float, token: int, depth: int, row: int = 0
    ) -> tuple[bool, NodeFeatures]:
        features = stop_rules.measure(_row(logits, row), temperature, token)
        return stop_rules.should_stop(stop_rule, features, depth), features

    def pick(
        self, logits: Tensor, distribution: DistributionParams, key: int, k: int, probs: bool, row: int = 0
    ) -> tuple[list[int], list[float]]:
        return sampling.pick(_row(logits, row), distribution, key, k)

    def _pick_next(
        self, logits: Tensor, distributions: Sequence[DistributionParams], keys: Sequence[int]
    ) -> Tensor:
        return sampling.pick_next(logits, zip(range(len(keys)), distributions, keys))

    def pick_rows(
        self,
        logits: Tensor,
        distribution: DistributionParams,
        keys: Sequence[int],
        k: int,
        ids: Tensor | None = None,
        probs: bool = True,
    ) -> tuple[Tensor, Tensor]:
        out, prob = torch.full((len(keys), k), -1, dtype=torch.int32), torch.zeros(len(keys), k)
        for r, key in enumerate(keys):
            entries, probabilities = sampling.pick(logits[r], distribution, key, k, ids)
            out[r, : len(entries)] = torch.tensor(entries, dtype=torch.int32)
            if probs:
                prob[r, : len(entries)] = torch.tensor(probabilities)
        return out, prob

    def candidates(self, k: int, wide: int, levels: int) -> candidates.Plain:
        return candidates.Plain(self.pick_rows, k, wide)


@dataclass
class _AdaptedLayer:
    """Linears of one layer with the updates of LoRA adapters, summed in the backend's wide dtype."""

    backend: TorchBackend
    layer: DecoderLayer
    index: int
    runs: Runs

    def __call__(self, name: str, x: Tensor, add: Tensor | None = None) -> Tensor:
        y = self.backend.linear(x, getattr(self.layer, name), add)
        for first, count, adapter in self.runs:
            rows = x[first : first + count].to(self.backend.wide)
            for outputs, a, b in adapter[self.index][name]:
                part = y[first : first + count, outputs]
                part.copy_(part.to(self.backend.wide) + rows @ a @ b)
        return y


def beside(backend: Backend, e: Tensor, g: Tensor, norms: Norms) -> Tensor:
    """`Backend.pair` of embeddings e [N, h]."""
    weights = norms.token, norms.state
    parts = [x if w is None else backend.rms_norm(x, w, norms.eps) for x, w in zip((e, g), weights)]
    return torch.cat(parts, dim=-1)


def _row(logits: Tensor, row: int) -> Tensor:
    return logits if logits.dim() == 1 else logits[row]


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the first 2·cos.shape[-1] dimensions in pairs (i, i + half), as transformers does."""
    half = cos.shape[-1]
    a, b, rest = x[..., :half].float(), x[..., half : 2 * half].float(), x[..., 2 * half :]
    return torch.cat([a * cos - b * sin, b * cos + a * sin, rest.float()], dim=-1)
