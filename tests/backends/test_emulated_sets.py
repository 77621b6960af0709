"""Products of instruction sets that this processor may lack; emulated/ has their instructions in C."""

from __future__ import annotations

import ctypes
import os
import subprocess
from pathlib import Path

import pytest
import torch
from bfloat16_sums import by_tiles, hard_numbers
from kernel_cases import c_backend, kernels_but_for, needs_c
from neon import CALLED
from torch import Tensor

from outrider.backends.cpu import build, structs, targets
from outrider.backends.cpu.bindings import declare
from outrider.backends.cpu.packing import Packed, pack
from outrider.core.quantized import QuantizedWeight

HERE = Path(__file__).parent
SETS = {
    "avx2": [],
    "avx_vnni": ["-DEMULATE_VNNI"],
    "avx512": ["-DEMULATE_AVX512"],
    "avx512_vnni": ["-DEMULATE_AVX512", "-DEMULATE_VNNI"],
}
AMX = ["-DEMULATE_AMX"]
ROWS = 19  # two whole tiles of eight rows, and a part of one
pytestmark = [needs_c, pytest.mark.skipif("avx2" not in targets.available(), reason="no AVX2 here")]


def compiled(flags: list[str], to: Path, *inputs: Path | str) -> Path:
    emulation = *targets.TARGETS["avx2"].flags, f"-I{HERE / 'emulated'}", CALLED, *flags
    command = ["cc", "-Wno-psabi", "-std=gnu11", "-pthread", *emulation, f"-I{build.FOLDER}"]
    subprocess.run([*command, *map(str, inputs), "-o", str(to), "-lm"], check=True)
    return to


@pytest.mark.parametrize("name", SETS)
def test_byte_products_are_those_of_the_definition(name: str, tmp_path: Path) -> None:
    program = compiled(SETS[name], tmp_path / "dot_bytes", "-O1", HERE / "dot_bytes.c")
    assert subprocess.run([program]).returncode == 0


@pytest.mark.parametrize("name", [name for name in SETS if name != "avx2"])
def test_linears_are_those_of_this_processor(name: str, tmp_path: Path) -> None:
    files = (build.FOLDER / f"{file}.c" for file in ("linear_int", "memory", "threads"))
    library = ctypes.CDLL(
        str(compiled(SETS[name], tmp_path / "linear.so", "-O0", "-shared", "-fPIC", *files))
    )
    backend, x = c_backend(), torch.randn(ROWS, 96)
    for bits, offsets in ((8, False), (8, True), (4, False), (4, True)):
        values = torch.randint(-(2 ** (bits - 1)), 2 ** (bits - 1), (70, 96), dtype=torch.int8)
        weight = backend.pack(
            QuantizedWeight(values, torch.rand(70, 3), torch.randn(70, 3) if offsets else None, bits, 32)
        )
        y = torch.empty(ROWS, 70)
        sizes = ctypes.c_int64(ROWS), ctypes.c_int64(96), ctypes.c_void_p(y.data_ptr()), ctypes.c_int64(70)
        library.linear_int(ctypes.byref(weight.c), ctypes.c_void_p(structs.address(x)), *sizes, 0)
        assert torch.equal(y, backend.linear(x, weight)), (bits, offsets)


# ---- AMX


@pytest.fixture(scope="module")
def amx(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """Kernels that multiply bfloat16 in emulated tiles."""
    to = tmp_path_factory.mktemp("amx") / "kernels.so"
    flags = [*build.FLAGS, "-O1"]
    return declare(ctypes.CDLL(str(compiled([*AMX, *flags], to, *kernels_but_for("linear")))))


def linear(library: ctypes.CDLL, x: Tensor, weight: Packed) -> Tensor:
    y = torch.empty(len(x), weight.outputs)
    library.linear(weight.c, x.data_ptr(), *x.shape, y.data_ptr(), weight.outputs, 0)
    return y


@pytest.mark.parametrize(("inputs", "outputs"), [(1, 1), (2, 64), (65, 63), (200, 130), (384, 96)])
def test_tiles_sum_by_the_definition(amx: ctypes.CDLL, inputs: int, outputs: int) -> None:
    torch.manual_seed(inputs)
    x, weight = torch.randn(37, inputs) * torch.logspace(-6, 3, 37)[:, None], torch.randn(outputs, inputs)
    packed, expected = pack(weight, None, torch.bfloat16, torch.bfloat16), by_tiles(x, weight)
    assert amx.has_bfloat16_tiles() and amx.has_bfloat16_products()
    for rows in (1, 2, 15, 16, 17, 37):
        assert torch.equal(linear(amx, x[:rows], packed), expected[:rows]), rows
        assert torch.equal(linear(amx, x[-rows:].contiguous(), packed), expected[-rows:]), rows


def around_the_border() -> tuple[Tensor, Tensor]:
    """Sums from the smallest normal number down to 2**-150 less, in steps of 2**-157: half is rounded up."""
    x, weight = torch.zeros(1, 4), torch.zeros(129, 4)
    x[0, ::2], weight[:, 0] = torch.tensor([2.0**-63, 2.0**-75]), 2.0**-63
    weight[:, 2] = torch.arange(129) * -(2.0**-82)
    return x, weight


def test_a_sum_is_flushed_if_it_is_subnormal_when_rounded_to_24_bits(amx: ctypes.CDLL) -> None:
    x, weight = around_the_border()
    got = linear(amx, x, pack(weight, None, torch.bfloat16, torch.bfloat16))
    assert torch.equal(got, by_tiles(x, weight)) and (got[0] > 0).sum() == 65


@pytest.mark.skipif("amx" not in targets.available(), reason="no AMX here")
def test_the_instruction_gives_the_bits_of_the_emulated_one(amx: ctypes.CDLL) -> None:
    real = build.load(build.recipe({**os.environ, "OUTRIDER_ISA": "amx"}), os.environ)
    assert real is not None and declare(real).has_bfloat16_tiles()
    for seed in range(40):
        torch.manual_seed(seed)
        x, weight = (hard_numbers(33, 96), hard_numbers(128, 96)) if seed else around_the_border()
        packed = pack(weight, None, torch.bfloat16, torch.bfloat16)
        ours, theirs = linear(real, x, packed), linear(amx, x, packed)
        differs = (ours.view(torch.int32) != theirs.view(torch.int32)) & ~(ours.isnan() & theirs.isnan())
        assert not differs.any(), (seed, ours[differs], theirs[differs])
