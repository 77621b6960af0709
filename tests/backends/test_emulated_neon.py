"""The kernels for NEON on x86-64: emulated/arm_neon.h has its instructions in C."""

from __future__ import annotations

import ctypes
import platform
import subprocess
from pathlib import Path

import pytest
import torch
from bfloat16_sums import by_bfdot, hard_numbers
from kernel_cases import c_backend, kernels_but_for, needs_c
from neon import EMULATED
from torch import Tensor

from outrider.backends.cpu import build
from outrider.backends.cpu.backend import CpuBackend
from outrider.backends.cpu.bindings import declare
from outrider.core.quantized import QuantizedWeight
from outrider.core.stop_rule import StopRule, measure

HERE = Path(__file__).parent
pytestmark = [needs_c, pytest.mark.skipif(platform.machine() != "x86_64", reason="emulated on x86-64")]


@pytest.fixture(scope="module")
def neon(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    library = tmp_path_factory.mktemp("neon") / "kernels.so"
    flags = [*build.FLAGS, "-O1", *EMULATED, f"-I{build.FOLDER}"]
    inputs = kernels_but_for("linear", "linear_int", "stop")
    subprocess.run(["cc", *flags, *inputs, "-o", str(library), "-lm"], check=True)
    return declare(ctypes.CDLL(str(library)))


def rounding(library: ctypes.CDLL) -> CpuBackend:
    return CpuBackend(library, torch.bfloat16, torch.bfloat16)


def same(a: Tensor, b: Tensor) -> bool:
    """All NaN are one."""
    return bool(((a.view(torch.int32) == b.view(torch.int32)) | (a.isnan() & b.isnan())).all())


def test_byte_products_are_those_of_the_definition(tmp_path: Path) -> None:
    program = tmp_path / "dot_bytes"
    source = str(HERE / "dot_bytes.c")
    subprocess.run(
        ["cc", "-O1", *EMULATED, f"-I{build.FOLDER}", source, "-o", str(program), "-lm"], check=True
    )
    assert subprocess.run([program]).returncode == 0


@pytest.mark.parametrize(("inputs", "outputs"), [(1, 1), (2, 64), (65, 63), (200, 130), (384, 96)])
def test_bfdot_sums_by_the_definition(neon: ctypes.CDLL, inputs: int, outputs: int) -> None:
    torch.manual_seed(inputs)
    backend, weight = rounding(neon), torch.randn(outputs, inputs)
    x = torch.randn(37, inputs) * torch.logspace(-6, 3, 37)[:, None]
    packed, expected = backend.pack(weight), by_bfdot(x, weight)
    assert neon.has_bfdot() and neon.has_bfloat16_products() and "bfdot" in backend.name
    for rows in (1, 2, 3, 6, 7, 16, 37):
        assert same(backend.linear(x[:rows], packed), expected[:rows]), rows
        assert same(backend.linear(x[-rows:].contiguous(), packed), expected[-rows:]), rows


def test_bfdot_of_subnormal_and_large_numbers(neon: ctypes.CDLL) -> None:
    backend = rounding(neon)
    for seed in range(10):
        torch.manual_seed(seed)
        x, weight = hard_numbers(33, 96), hard_numbers(128, 96)
        assert same(backend.linear(x, backend.pack(weight)), by_bfdot(x, weight)), seed


def test_quantized_linears_are_those_of_this_processor(neon: ctypes.CDLL) -> None:
    x = torch.randn(7, 96)
    for bits, offsets in ((8, False), (8, True), (4, False), (4, True)):
        values = torch.randint(-(2 ** (bits - 1)), 2 ** (bits - 1), (70, 96), dtype=torch.int8)
        offset = torch.randn(70, 3) if offsets else None
        weight = c_backend().pack(QuantizedWeight(values, torch.rand(70, 3), offset, bits, 32))
        assert torch.equal(rounding(neon).linear(x, weight), c_backend().linear(x, weight)), (bits, offsets)


@pytest.mark.parametrize("vocabulary", [3, 7, 300])
def test_features_of_a_draft_token_are_those_of_the_definition(vocabulary: int, neon: ctypes.CDLL) -> None:
    logits = torch.randn(vocabulary, generator=torch.Generator().manual_seed(vocabulary)) * 4
    features = rounding(neon).should_stop(StopRule(), logits, 0.6, 2, 0)[1]
    assert features == pytest.approx(measure(logits, 0.6, 2), abs=2e-5)
