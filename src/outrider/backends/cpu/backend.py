"""The C kernels, called through ctypes (build.py finds or compiles those for this processor)."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from outrider.backends.base import LayerKV, ModelShape, Norms, ScoreModifier, Scores
from outrider.backends.cpu import build, candidates, lora, structs, threads
from outrider.backends.cpu.bindings import STRUCTS, declare
from outrider.backends.cpu.fused import CpuFusedModel, Stack
from outrider.backends.cpu.lora import Adapter
from outrider.backends.cpu.packing import KINDS, Packed, pack
from outrider.backends.cpu.picking import Picking
from outrider.backends.cpu.recurrence import CpuRecurrence
from outrider.backends.cpu.recurrent_rows import attach
from outrider.backends.cpu.rules import Distributions, TreeVerifier
from outrider.backends.cpu.structs import StepView, address
from outrider.backends.launch import AttentionShape, Call, Launched, launched
from outrider.backends.layer import DecoderLayer, LayerExperts, places
from outrider.cache.pool import Pool
from outrider.core.limits import check_attention
from outrider.core.lora import Adapted, LayerSizes, Runs
from outrider.core.quantized import QuantizedWeight
from outrider.core.step_input import StepInput

Library = ctypes.CDLL  # of the kernels


@lru_cache(maxsize=1)
def library() -> Library | None:
    """The compiled kernels.  None, with one warning, if there are none and they cannot be built."""
    loaded = build.load(build.recipe(os.environ), os.environ)
    if loaded is not None:
        threads.adopt(declare(loaded))
    return loaded


class CpuBackend(Picking):
    """Row-invariant: every row is computed by the same operations in the same order (see kernels.h)."""

    exact = True
    device, activations = torch.device("cpu"), torch.float32
    pick_next = top_next = None  # `fused` has chains, `candidates` trees

    def __init__(
        self, lib: ctypes.CDLL, dtype: torch.dtype, inputs_dtype: torch.dtype = torch.float32
    ) -> None:
        """inputs_dtype: what the inputs of bfloat16 linears are rounded to."""
        super().__init__(lib)
        self.dtype, self.inputs_dtype = dtype, inputs_dtype
        self._rounds_inputs = dtype == inputs_dtype == torch.bfloat16
        inputs = "bfloat16 inputs, " if inputs_dtype == torch.bfloat16 else ""
        if inputs and lib.has_bfloat16_tiles():  # other bits
            inputs = "bfloat16 inputs in AMX tiles, "
        elif inputs and lib.has_bfdot():  # other bits, too
            inputs = "bfloat16 inputs by bfdot, "
        self.name = f"C ({str(dtype).removeprefix('torch.')} weights, {inputs}float32 sums)"
        self.fused, self.verifier = CpuFusedModel(lib), TreeVerifier(lib)
        self.distributions = Distributions(lib)
        self.recurrence = CpuRecurrence(lib)

    def pack(self, weight: Tensor | QuantizedWeight, bias: Tensor | None = None) -> Packed:
        return pack(weight, bias, self.dtype, self.inputs_dtype)

    def pack_experts(self, experts: LayerExperts) -> LayerExperts:
        return experts

    def linear(self, x: Tensor, weight: Packed, add: Tensor | None = None) -> Tensor:
        n, k, o = x.shape[0], weight.inputs, weight.outputs
        y = torch.empty(n, o) if add is None else add
        self.lib.linear(weight.c, x.data_ptr(), n, k, y.data_ptr(), o, add is not None)
        return y

    def launch(self, method: Launched, call: Call) -> Tensor:
        return launched(method, call)

    def embed(self, weight: Packed, step_input: StepInput) -> Tensor:
        n, h = step_input.length, weight.inputs
        y = torch.empty(n, h)
        self.lib.embed(weight.c, structs.view(step_input).input_ids, n, h, y.data_ptr())
        return y

    def pair(self, weight: Packed, step_input: StepInput, g: Tensor, norms: Norms) -> Tensor:
        n, h = g.shape
        y, ids = torch.empty(n, weight.inputs + h), structs.view(step_input).input_ids
        given = address(norms.token), address(norms.state), norms.eps
        self.lib.pair(weight.c, ids, n, weight.inputs, g.data_ptr(), h, *given, y.data_ptr())
        return y

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        y = torch.empty_like(x)
        self.lib.rms_norm(x.data_ptr(), weight.data_ptr(), x.shape[0], x.shape[1], eps, y.data_ptr())
        return y

    def soft_cap(self, x: Tensor, cap: float) -> Tensor:
        self.lib.soft_cap(x.data_ptr(), x.shape[0], x.shape[1], cap, None, 0)
        return x

    def prepare(self, step_input: StepInput) -> StepView:
        return structs.view(step_input)

    def rope_store(self, qkv: Tensor, spec: AttentionShape, rotations: Tensor, kv: LayerKV) -> Tensor:
        q = torch.empty(qkv.shape[0], spec.heads, kv.pool.width)
        attention = self._attention(spec, kv)
        attention.rotary, attention.rotary_dim = rotations.data_ptr(), rotations.shape[1]
        self.lib.rope_store(attention, structs.view(kv.step_input).rows, qkv.data_ptr(), q.data_ptr())
        return q

    def _attention(self, spec: AttentionShape, kv: LayerKV) -> Any:
        """`Attention` of kernels.h, without the rotations, the scale and the window of a call."""
        _, pool, layer = kv
        keys = structs.keys_of(pool, layer)
        norms = address(spec.q_norm), address(spec.k_norm)
        sizes = pool.head_bytes, spec.heads, spec.kv_heads, spec.head_dim, pool.width, 0, 0
        ends = None, spec.eps, 0.0, KINDS[pool.dtype], self._rounds_inputs
        return STRUCTS["Attention"](keys, keys + pool.plane_bytes, *sizes, *norms, *ends)

    def attend(self, q: Tensor, spec: AttentionShape, kv: LayerKV, scores: Scores) -> Tensor:
        out = torch.empty(q.shape[0], spec.heads * spec.head_dim)
        attention, rows = self._attention(spec, kv), structs.view(kv.step_input).rows
        attention.scale, attention.window = scores.scale, scores.window
        threads.adopt(self.lib)
        self.lib.attend(attention, rows, q.data_ptr(), _modifier(scores.modifier), out.data_ptr())
        return out

    def pack_layers(self, spec: ModelShape, layers: Sequence[DecoderLayer], rotations: Tensor) -> Stack:
        """The layers as C structs.  They point into tensors that the result keeps alive."""
        check_attention("the model", spec.heads, spec.kv_heads, spec.head_dim, rotations.shape[1])
        packed = (STRUCTS["Layer"] * len(layers))()
        for to, layer, place in zip(packed, layers, places(layers)):
            to.place = place
            for name in structs.LINEARS:
                if (linear := getattr(layer, name)) is not None:
                    setattr(to, name, linear.c)
            for name in structs.VECTORS:
                setattr(to, name, address(getattr(layer, name)))
            to.window, to.rotary = layer.window, address(layer.rotations)
        structures = structs.attach_experts(packed, layers), structs.attach_deltas(packed, layers)
        sizes = {name: getattr(spec, name) for name in structs.SIZES} | structs.expert_sizes(layers)
        shape = STRUCTS["ModelShape"](
            **sizes, layers=len(layers), padded_dim=Pool.wide(spec.head_dim), scale=layers[0].scale,
            rotary_dim=rotations.shape[1], rotary=rotations.data_ptr(), cap=layers[0].cap,
            rounds_inputs=self._rounds_inputs, is_gelu=layers[0].gelu,
        )  # fmt: skip
        return Stack(packed, shape, (layers, rotations, structures))

    def skip_sublayers(self, stack: Stack, skips: Sequence[int]) -> Stack:
        layers = (STRUCTS["Layer"] * len(skips)).from_buffer_copy(stack.layers)
        for layer, skip in zip(layers, skips):
            layer.skip = skip
        return Stack(layers, stack.shape, stack.alive)

    def pack_adapter(self, spec: LayerSizes, layers: Adapted) -> Adapter:
        return lora.pack(spec, layers)

    def run_layers(
        self, stack: Stack, x: Tensor, kv: LayerKV, runs: Runs = (), u: Tensor | None = None
    ) -> Tensor:
        threads.adopt(self.lib)
        (step_input, pool, layer), adapters = kv, lora.rows(runs)
        stack.shape.kv_kind, keys = KINDS[pool.dtype], structs.keys_of(pool, layer)
        rows, width = structs.view(step_input).with_adapters(adapters), 0 if u is None else u.shape[1]
        attach(rows, step_input, pool.states)
        given = x.data_ptr(), address(u), width, None
        self.lib.stack(stack.shape, stack.layers, rows, keys, pool.plane_bytes, *given)
        return x

    def candidates(self, k: int, wide: int, levels: int) -> candidates.Compiled:
        return candidates.Compiled(self.lib, k, wide, levels)


def _modifier(modifier: ScoreModifier | None) -> Any:
    if modifier is None:
        return None
    return STRUCTS["ScoreModifier"](address(modifier.slopes), address(modifier.sinks), modifier.cap)
