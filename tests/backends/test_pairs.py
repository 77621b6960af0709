"""Linears that round their inputs to bfloat16 follow the definition in pairs.h or tiles.h, bit for bit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from bfloat16_sums import SMALLEST, by_definition
from helpers import answer
from kernel_cases import CPU, c_backend, near, needs_c, two_threads

from outrider import LLM, SamplingParams
from outrider.backends.cpu.backend import CpuBackend
from outrider.backends.select import backend_for
from outrider.errors import ConfigError


def rounding_backend() -> CpuBackend:
    return CpuBackend(c_backend().lib, torch.bfloat16, torch.bfloat16)


@needs_c
@pytest.mark.parametrize(("inputs", "outputs"), [(1, 1), (2, 64), (65, 63), (200, 130), (384, 96)])
def test_linear_is_the_definition(inputs: int, outputs: int) -> None:
    torch.manual_seed(inputs)
    x, weight = torch.randn(13, inputs) * torch.logspace(-6, 3, 13)[:, None], torch.randn(outputs, inputs)
    backend = rounding_backend()
    assert torch.equal(backend.linear(x, backend.pack(weight)), by_definition(x, weight))
    bias, base = torch.randn(outputs), torch.randn(13, outputs)
    near(
        backend.linear(x, backend.pack(weight, bias), add=base.clone()),
        by_definition(x, weight) + bias + base,
    )


@needs_c
def test_numbers_below_the_smallest_normal_one_are_zero() -> None:
    backend = rounding_backend()
    tiny, one = torch.tensor([[SMALLEST / 2, SMALLEST / 4]]), torch.tensor([[1.0, 2.0]])
    for x, weight in ((tiny, one), (one, tiny), (one * SMALLEST, one / 4)):
        assert torch.equal(backend.linear(x, backend.pack(weight)), by_definition(x, weight))
    assert backend.linear(tiny, backend.pack(one)) == 0
    assert backend.linear(one * SMALLEST, backend.pack(one)) > 0


@needs_c
def test_what_is_no_number_stays_in_its_row() -> None:
    backend, x = rounding_backend(), torch.randn(4, 66)
    weight = backend.pack(torch.randn(70, 66))
    whole = backend.linear(x, weight)
    odd_nan = torch.tensor([0x7FFFFFFF], dtype=torch.int32).view(
        torch.float32
    )  # rounding must not carry into its sign
    for bad in (torch.tensor([float("inf")]), odd_nan):
        x[2, 40:41] = bad
        got = backend.linear(x, weight)
        assert not got[2].isfinite().any() and torch.equal(got[[0, 1, 3]], whole[[0, 1, 3]])


@needs_c
@pytest.mark.parametrize(("inputs", "outputs"), [(65, 63), (384, 200)])
def test_rows_are_independent(inputs: int, outputs: int) -> None:
    backend, x = rounding_backend(), torch.randn(70, inputs)
    weight = backend.pack(torch.randn(outputs, inputs), torch.randn(outputs))
    alone = torch.cat([backend.linear(x[i : i + 1], weight) for i in range(70)])
    for n in (*range(1, 20), 64, 70):
        assert torch.equal(backend.linear(x[:n], weight), alone[:n]), n
        with two_threads():
            assert torch.equal(backend.linear(x[70 - n :], weight), alone[70 - n :]), n


@needs_c
def test_float32_and_quantized_weights_keep_their_inputs() -> None:
    backend, plain, weight = rounding_backend(), c_backend(torch.bfloat16), torch.randn(64, 64)
    assert backend.pack(weight).rounds_inputs and not plain.pack(weight).rounds_inputs
    assert not CpuBackend(backend.lib, torch.float32, torch.bfloat16).pack(weight).rounds_inputs


@needs_c
def test_speculation_keeps_the_text(tiny: Path) -> None:
    prompt, params = [5, 6, 7, 5, 6], SamplingParams(temperature=0.8, seed=3, max_tokens=40)
    options = {"dtype": "bfloat16", "activations": "bfloat16"}
    plain = LLM(str(tiny), **options)
    assert "bfloat16 inputs" in plain.engine.decoder.backend.name
    draft = {"method": "draft_model", "model": str(tiny), "num_speculative_tokens": 4}
    llm = LLM(str(tiny), **options, speculative_config=draft)
    got = answer(llm, prompt, params).outputs[0]
    assert got.token_ids == answer(plain, prompt, params).outputs[0].token_ids
    assert got.speculation.accepted > 0


@needs_c
def test_inputs_are_rounded_by_default_where_an_instruction_multiplies_them() -> None:
    fast = torch.bfloat16 if c_backend().lib.has_bfloat16_products() else torch.float32
    for dtype, expected in ((torch.bfloat16, fast), (torch.float32, torch.float32)):
        backend = backend_for(CPU, dtype)
        assert isinstance(backend, CpuBackend) and backend.inputs_dtype == expected


@needs_c
def test_the_name_tells_kernels_with_other_bits_apart() -> None:
    """Ranks compare it."""
    in_tiles = bool(c_backend().lib.has_bfloat16_tiles())
    assert ("AMX" in rounding_backend().name) == in_tiles
    assert "AMX" not in c_backend(torch.bfloat16).name


# ---- refused


@needs_c
def test_bfloat16_activations_need_bfloat16_weights() -> None:
    with pytest.raises(ConfigError, match="activations='bfloat16' is for bfloat16 weights"):
        backend_for(CPU, torch.float32, "bfloat16")


def test_bfloat16_activations_need_the_c_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTRIDER_KERNELS", "torch")
    with pytest.raises(ConfigError, match="activations='bfloat16' is for the C kernels"):
        backend_for(CPU, torch.bfloat16, "bfloat16")


def test_unknown_activations_are_named(tiny: Path) -> None:
    with pytest.raises(ConfigError, match=r"unknown activations 'float16'.* Valid: auto, bfloat16, float32"):
        LLM(str(tiny), activations="float16")
