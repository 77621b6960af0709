"""Linears, norms, activation and rotary embedding of the Triton kernels, beside the reference."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from interpreted import DEVICE
from kernel_cases import SLOTS, heads_of, random_plan

from outrider.backends.base import LayerKV
from outrider.backends.torch.backend import TorchBackend
from outrider.cache.pool import Pool
from outrider.checkpoints.quantize import reduced
from outrider.core.quantized import QuantizedWeight

pytest.importorskip("triton", reason="triton is not installed")

from outrider.backends.triton.backend import TritonBackend
from outrider.backends.triton.linear import same_in_all_tiles

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton")  # numpy's, of masked lanes
TOLERANCE = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
each_dtype = pytest.mark.parametrize("dtype", TOLERANCE, ids=str)


def near(found: Any, wanted: Any, dtype: torch.dtype) -> None:
    torch.testing.assert_close(found.double(), wanted.double(), rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


@each_dtype
@pytest.mark.parametrize(("inputs", "outputs", "rows"), [(1, 3, 1), (100, 33, 3), (64, 32, 65)])
def test_linear_equals_the_definition_in_float64(
    inputs: int, outputs: int, rows: int, dtype: torch.dtype
) -> None:
    backend = TritonBackend(DEVICE, dtype)
    weight = (torch.randn(outputs, inputs) / inputs**0.5).to(dtype)
    x, bias, base = (torch.randn(size).to(dtype) for size in ((rows, inputs), (outputs,), (rows, outputs)))
    exact = x.double() @ weight.double().T
    near(backend.linear(x.to(DEVICE), backend.pack(weight)).cpu(), exact, dtype)
    near(backend.linear(x.to(DEVICE), backend.pack(weight, bias)).cpu(), exact + bias, dtype)
    added = base.clone().to(DEVICE)
    assert backend.linear(x.to(DEVICE), backend.pack(weight), added) is added
    near(added.cpu(), exact + base, dtype)


@each_dtype
@pytest.mark.parametrize("bits", [4, 8])
def test_quantized_weights_keep_their_bits(bits: int, dtype: torch.dtype) -> None:
    backend, few = TritonBackend(DEVICE, dtype), reduced(torch.randn(40, 128) / 11, bits)
    assert isinstance(few, QuantizedWeight)
    packed = backend.pack(few)
    assert packed.values.dtype == torch.int8 and packed.values.numel() == 40 * 128 * bits // 8
    x = torch.randn(3, 128).to(dtype)
    dense = few.dense().to(dtype)
    near(backend.linear(x.to(DEVICE), packed).cpu(), x.double() @ dense.double().T, dtype)
    ids = torch.tensor([3, 39, 3])
    assert torch.equal(packed.embed(ids.to(DEVICE), dtype).cpu(), dense[ids])


def test_weights_of_4_bits_may_be_an_odd_number_and_have_offsets() -> None:
    """An odd number is not packed.  Every value, in both halves of a byte, with the offset of its group."""
    backend = TritonBackend(DEVICE, torch.float32)
    for inputs, group in ((48, 16), (17, 17)):
        values = (torch.arange(16 * inputs) % 16 - 8).to(torch.int8).view(16, inputs)
        scales, offsets = torch.rand(2, 16, inputs // group) + 0.5
        few, x = QuantizedWeight(values, scales, offsets, 4, group), torch.randn(2, inputs)
        packed, exact = backend.pack(few), x.double() @ few.dense().double().T
        near(backend.linear(x.to(DEVICE), packed).cpu(), exact, torch.float32)
        row = packed.embed(torch.tensor([5], device=DEVICE), torch.float32)
        assert torch.equal(row.cpu(), few.dense()[5:6])


def test_levels_beyond_4_bits_are_kept_in_8() -> None:
    """As those of MXFP4 and of IQ4_NL are."""
    levels = (-127, -12, -1, 0, 2, 8, 113)
    values = torch.tensor(levels, dtype=torch.int8)[torch.arange(5 * 64) % 7].view(5, 64)
    few = QuantizedWeight(values, torch.rand(5, 2) + 0.5, None, 4, 32, levels)
    backend, x = TritonBackend(DEVICE, torch.float32), torch.randn(3, 64)
    packed = backend.pack(few)
    exact = x.double() @ few.dense().double().T
    torch.testing.assert_close(
        backend.linear(x.to(DEVICE), packed).cpu().double(), exact, rtol=1e-5, atol=1e-3
    )
    ids = torch.tensor([4, 0])
    assert torch.equal(packed.embed(ids.to(DEVICE), torch.float32).cpu(), few.dense()[ids])


@each_dtype
@pytest.mark.parametrize("bits", [4, 16])
def test_a_row_of_a_linear_is_the_same_in_any_number_of_rows(bits: int, dtype: torch.dtype) -> None:
    backend, dense = TritonBackend(DEVICE, dtype), torch.randn(40, 192)
    weight = backend.pack(dense if bits == 16 else reduced(dense, bits))
    x = torch.randn(70, 192).to(DEVICE, dtype)
    y = backend.linear(x, weight)
    for rows in (slice(0, 1), slice(63, 66), slice(5, 70)):
        assert torch.equal(backend.linear(x[rows], weight), y[rows])
    assert same_in_all_tiles(DEVICE, dtype)


@each_dtype
@pytest.mark.parametrize("width", [1, 100])
def test_norm_and_activation(width: int, dtype: torch.dtype) -> None:
    ours, theirs = TritonBackend(DEVICE, dtype), TorchBackend(DEVICE, dtype)
    x, weight = (torch.randn(3, 2 * width) * 3).to(DEVICE, dtype), torch.randn(2 * width, device=DEVICE)
    near(ours.rms_norm(x, weight, 1e-6), theirs.rms_norm(x, weight, 1e-6), dtype)
    near(ours.silu_mul(x), theirs.silu_mul(x), dtype)
    far = torch.tensor([[-200.0, 88.0, 2.0, 3.0]], device=DEVICE)
    near(ours.silu_mul(far), theirs.silu_mul(far), torch.float32)
    near(ours.gelu_mul(x), theirs.gelu_mul(x), dtype)
    near(ours.gelu_mul(far), torch.tensor([[0.0, 264.0]], device=DEVICE), torch.float32)
    assert torch.equal(ours.gelu_mul(x[1:2]), ours.gelu_mul(x)[1:2])


@each_dtype
def test_what_is_added_is_normalized_first(dtype: torch.dtype) -> None:
    backend, weight = TritonBackend(DEVICE, dtype), torch.rand(100, device=DEVICE) + 0.5
    x, y = torch.randn(2, 5, 100, device=DEVICE).to(dtype)
    expected = x + backend.rms_norm(y, weight, 1e-6)
    one, all_rows = x[2:3].clone(), x.clone()
    assert backend.add_normed(all_rows, y, weight, 1e-6) is all_rows
    near(all_rows, expected, dtype)
    assert torch.equal(backend.add_normed(one, y[2:3], weight, 1e-6), all_rows[2:3])


def test_a_soft_cap_is_the_scaled_tanh() -> None:
    backend, x = TritonBackend(DEVICE, torch.float32), torch.randn(3, 1100, device=DEVICE) * 40
    found = backend.soft_cap(x.clone(), 30.0)
    near(found, 30 * torch.tanh(x.double() / 30), torch.float32)
    assert torch.equal(backend.soft_cap(x[1:2].clone(), 30.0), found[1:2])
    far = torch.tensor([[1e9, -1e9, float("inf"), -float("inf"), 0.0]], device=DEVICE)
    assert backend.soft_cap(far, 30.0).tolist() == [[30.0, -30.0, 30.0, -30.0, 0.0]]


@pytest.mark.parametrize("kv_dtype", [torch.float32, torch.bfloat16, torch.int8], ids=str)
@pytest.mark.parametrize(("rotary", "norms"), [(0, False), (8, True), (24, False), (24, True)])
def test_rope_store_equals_the_torch_reference(rotary: int, norms: bool, kv_dtype: torch.dtype) -> None:
    spec, step_input = heads_of(6, 3, 24, norms), random_plan(random.Random(rotary), 1)
    if norms:
        spec.q_norm, spec.k_norm = spec.q_norm.to(DEVICE), spec.k_norm.to(DEVICE)
    angle = torch.rand(64, rotary // 2, device=DEVICE) * 6
    turn = torch.cat([angle.cos(), angle.sin()], dim=-1).contiguous()
    qkv = torch.randn(step_input.length, 12 * 24, device=DEVICE)
    pools, found = [Pool(2, 3, 24, SLOTS, kv_dtype, DEVICE) for _ in range(2)], []
    for kind, pool in zip((TritonBackend, TorchBackend), pools):
        found.append(kind(DEVICE, torch.float32).rope_store(qkv, spec, turn, LayerKV(step_input, pool, 1)))
    near(*found, torch.float32)
    slots = torch.arange(SLOTS, device=DEVICE)
    ours, theirs = (pool.read(1, slots, torch.float32) for pool in pools)
    near(ours, theirs, torch.bfloat16 if kv_dtype != torch.float32 else kv_dtype)
    assert not pools[0].data[0].any(), "another layer was written to"
