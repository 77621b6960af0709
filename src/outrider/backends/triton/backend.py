"""The torch backend with Triton kernels in place of its linears, norms, attention and verification.

Every kernel computes a row by a fixed sequence of operations on that row's own data, for any number of rows.
So the backend is row-invariant, as far as a device's matrix instructions compute every row of a tile alike,
and in tiles of every shape.  The backend and `models/selftest.py` try that at start-up.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from outrider.backends.base import LayerKV, ModelShape, Scores
from outrider.backends.launch import AttentionShape, Call, Launched
from outrider.backends.layer import DecoderLayer, LayerExperts
from outrider.backends.torch.backend import Stack, TorchBackend
from outrider.backends.triton import attention, elementwise, experts, graphs, jobs, linear, picking
from outrider.backends.triton.fused import TritonFusedModel
from outrider.backends.triton.linear import TritonWeight
from outrider.backends.triton.plan import Plan, plan_of
from outrider.backends.triton.verifier import TreeVerifier
from outrider.core.lora import Runs
from outrider.core.params import DistributionParams
from outrider.core.quantized import QuantizedWeight
from outrider.core.step_input import StepInput


class TritonBackend(TorchBackend):
    """`Backend` for CUDA devices, and for the CPU in Triton's interpreter.

    graphs: of jobs (`fused.py`, `jobs.py`); None where every kernel is launched from Python.
    """

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        device = torch.empty(0, device=device).device  # with its number, as in the tensors of graphs
        super().__init__(device, dtype)
        self.exact = device.type != "cuda" or linear.same_in_all_tiles(device, dtype)
        self.verifier = TreeVerifier(device)
        self.pick_next, self.top_next = picking.pick_next, picking.TopNext()
        self.graphs, self.fused = graphs.graphs_for(device), TritonFusedModel(self)
        self.name = f"Triton on {device} ({str(dtype).removeprefix('torch.')})"

    def pack(self, weight: Tensor | QuantizedWeight, bias: Tensor | None = None) -> Any:
        return TritonWeight.of(weight, bias, self.device, self.dtype)

    def pack_experts(self, given: LayerExperts) -> LayerExperts:
        return experts.pack(given, self.dtype)

    def add_mixture(self, x: Tensor, u: Tensor, given: LayerExperts) -> Tensor:
        return experts.add_mixture(x, u, given)

    def linear(self, x: Tensor, weight: Any, add: Tensor | None = None) -> Tensor:
        return linear.linear(x, weight, add)

    def embed(self, weight: Any, step_input: StepInput) -> Tensor:
        embeddings: Tensor = weight.embed(step_input.on(self.device).input_ids, self.dtype)
        return embeddings

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return elementwise.rms_norm(x, weight, eps)

    def add_normed(self, x: Tensor, y: Tensor, weight: Tensor, eps: float) -> Tensor:
        return elementwise.add_normed(x, y, weight, eps)

    def silu_mul(self, x: Tensor) -> Tensor:
        return elementwise.silu_mul(x)

    def gelu_mul(self, x: Tensor) -> Tensor:
        return elementwise.gelu_mul(x)

    def soft_cap(self, x: Tensor, cap: float) -> Tensor:
        return elementwise.soft_cap(x, cap)

    def pack_layers(self, spec: ModelShape, layers: Sequence[DecoderLayer], rotations: Tensor) -> Stack:
        if self.device.type == "cuda":
            same = (attention.same_with_paths(layer, self.device, self.dtype) for layer in layers)
            self.exact = self.exact and all(same)
            if any(layer.experts is not None for layer in layers):
                self.exact = self.exact and experts.same_as_linear(self.device, self.dtype)
        return super().pack_layers(spec, layers, rotations)

    def prepare(self, step_input: StepInput) -> Any:
        return plan_of(step_input, self.device)

    def rope_store(self, qkv: Tensor, spec: AttentionShape, rotations: Tensor, kv: LayerKV) -> Tensor:
        plan: Plan = self.prepare(kv.step_input)
        return elementwise.rope_store(qkv, spec, rotations, plan, kv.pool, kv.layer)

    def attend(self, q: Tensor, spec: AttentionShape, kv: LayerKV, scores: Scores) -> Tensor:
        return attention.attend(q, spec, self.prepare(kv.step_input), kv, scores)

    def run_layers(
        self, stack: Stack, x: Tensor, kv: LayerKV, runs: Runs = (), u: Tensor | None = None
    ) -> Tensor:
        if self.graphs is None or runs or any(layer.delta is not None for layer in stack.layers):
            return super().run_layers(stack, x, kv, runs, u)
        return jobs.run_layers(self.graphs, super().run_layers, jobs.LayersCall(stack, x, kv, u))

    def launch_layers(self, stack: Stack, x: Tensor, kv: LayerKV, runs: Runs = ()) -> Tensor:
        return super().run_layers(stack, x, kv, runs)

    def launch(self, method: Launched, call: Call) -> Tensor:
        sizes = jobs.method_sizes(call) if self.graphs is not None else None
        if self.graphs is None or sizes is None:
            return super().launch(method, call)
        return self.graphs.run(jobs.Method(method, call, sizes))[0]

    def pick(
        self, logits: Tensor, distribution: DistributionParams, key: int, k: int, probs: bool, row: int = 0
    ) -> tuple[list[int], list[float]]:
        rows = logits[None] if logits.dim() == 1 else logits[row : row + 1]
        if k == 1 and not probs:
            found = picking.pick_next(rows, [distribution], [key]).tolist()
            tokens = [token for token in found if token >= 0]
            return tokens, [0.0] * len(tokens)
        picked, shares = picking.pick_rows(rows, distribution, [key], k, None)
        tokens = [token for token in picked[0].tolist() if token >= 0]
        return tokens, shares[0, : len(tokens)].tolist()

    def pick_rows(
        self,
        logits: Tensor,
        distribution: DistributionParams,
        keys: Sequence[int],
        k: int,
        ids: Tensor | None = None,
        probs: bool = True,
    ) -> tuple[Tensor, Tensor]:
        found, shares = picking.pick_rows(logits, distribution, keys, k, ids)
        return found, shares if probs else torch.zeros_like(shares)
