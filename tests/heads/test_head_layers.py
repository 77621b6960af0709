"""Fused calls of heads: the same bits as step by step."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from outrider.backends.base import Backend, LayerKV, Norms, Scores
from outrider.backends.cpu import backend as cpu
from outrider.backends.cpu.backend import CpuBackend
from outrider.backends.torch.backend import TorchBackend
from outrider.cache.pool import Pool
from outrider.checkpoints.quantize import quantize
from outrider.core.step_input import StepInput

CPU = torch.device("cpu")
V, H, INNER, HEADS, KV, D, SLOTS, EPS = 70, 48, 80, 4, 2, 16, 40, 1e-5
needs_c = pytest.mark.skipif(cpu.library() is None, reason="no C compiler here")
KINDS = [pytest.param("c", marks=needs_c), "torch"]


def backend_of(kind: str, dtype: torch.dtype) -> Any:
    library = cpu.library()
    if kind == "torch":
        return TorchBackend(CPU, dtype)
    assert library is not None
    return CpuBackend(library, dtype)


def plan_of(tokens: Sequence[int], first: int = 0) -> StepInput:
    return StepInput.of_chain(array("i", range(SLOTS)), first, tokens)


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bits", [None, 8])
@pytest.mark.parametrize("count", [1, 3, 20])
def test_pairs_equal_embedding_norms_and_concatenation(
    kind: str, dtype: torch.dtype, bits: int | None, count: int
) -> None:
    backend: Backend = backend_of(kind, dtype)
    table = torch.randn(V, 64)
    weight = backend.pack(table if bits is None else quantize(table, bits))
    step_input, g = (
        plan_of(torch.randint(V, (count,)).tolist()),
        torch.randn(count, H).to(backend.activations),
    )
    token, state = torch.rand(64) + 0.5, torch.rand(H) + 0.5
    e = backend.embed(weight, step_input)
    normed = backend.rms_norm(e, token, EPS), backend.rms_norm(g, state, EPS)
    before = g.clone()
    assert torch.equal(backend.pair(weight, step_input, g, Norms(None, None, EPS)), torch.cat([e, g], dim=1))
    assert torch.equal(
        backend.pair(weight, step_input, g, Norms(token, None, EPS)), torch.cat([normed[0], g], dim=1)
    )
    assert torch.equal(
        backend.pair(weight, step_input, g, Norms(None, state, EPS)), torch.cat([e, normed[1]], dim=1)
    )
    assert torch.equal(
        backend.pair(weight, step_input, g, Norms(token, state, EPS)), torch.cat(normed, dim=1)
    )
    assert torch.equal(g, before)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("reads", ["its norm", "itself", "something wider"])
def test_block_attends_over_its_given_input(kind: str, dtype: torch.dtype, reads: str) -> None:
    backend, wide = backend_of(kind, dtype), 2 * H if reads == "something wider" else H

    def weight(outputs: int, inputs: int) -> Any:
        return backend.pack(torch.randn(outputs, inputs) * inputs**-0.5)

    layer = SimpleNamespace(
        delta=None,
        query_gate=None,
        shared_gate=None,
        qkv=weight((HEADS + 2 * KV) * D, wide),
        o=weight(H, HEADS * D),
        gate_up=weight(2 * INNER, H),
        down=weight(H, INNER),
        norm_in=torch.rand(H) + 0.5,
        norm_post=torch.rand(H) + 0.5,
        q_norm=torch.rand(D),
        k_norm=torch.rand(D),
        window=5,
        sinks=None,
        heads=HEADS,
        kv_heads=KV,
        head_dim=D,
        eps=EPS,
        hidden=H,
        inner=INNER,
        scale=D**-0.5,
        experts=None,
        norm_attended=None,
        norm_mlp=None,
        rotations=None,
        cap=0.0,
        gelu=False,
    )
    turn = torch.randn(SLOTS, D)
    stack = backend.pack_layers(layer, [layer], turn)  # type: ignore[arg-type]
    ours, theirs = (Pool(3, KV, D, SLOTS, dtype, CPU) for _ in range(2))
    for first, count in ((0, 9), (9, 1), (10, 3)):
        step_input, x = plan_of([0] * count, first), torch.randn(count, H).to(backend.activations)
        u: Tensor | None = {"itself": x, "something wider": torch.randn(count, wide).to(x.dtype)}.get(reads)
        expected, seen = x.clone(), backend.rms_norm(x, layer.norm_in, EPS) if u is None else u.clone()
        q = backend.rope_store(backend.linear(seen, layer.qkv), layer, turn, LayerKV(step_input, theirs, 2))
        backend.linear(
            backend.attend(q, layer, LayerKV(step_input, theirs, 2), Scores(D**-0.5, layer.window)),
            layer.o,
            expected,
        )
        both = backend.linear(backend.rms_norm(expected, layer.norm_post, EPS), layer.gate_up)
        found = backend.run_layers(stack, x, LayerKV(step_input, ours, 2), u=u)
        gate, up = both.chunk(2, dim=-1)
        inner = backend.linear((F.silu(gate.float()) * up.float()).to(x.dtype), layer.down, expected)
        loose = 2e-2 if x.dtype == torch.bfloat16 else 1e-5
        torch.testing.assert_close(found.float(), inner.float(), rtol=loose, atol=loose)
        slots = torch.arange(first + count)
        for at in range(3):
            assert torch.equal(ours.read(at, slots, torch.float32), theirs.read(at, slots, torch.float32))
