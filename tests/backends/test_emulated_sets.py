"""Byte products of instruction sets that this processor may lack; emulated/ has their instructions in C."""

from __future__ import annotations

import ctypes
import subprocess
from pathlib import Path

import pytest
import torch
from kernel_cases import c_backend, needs_c

from outrider.backends.cpu import build, structs
from outrider.core.quantized import QuantizedWeight

HERE = Path(__file__).parent
SETS = {
    "avx2": [],
    "avx_vnni": ["-DEMULATE_VNNI"],
    "avx512": ["-DEMULATE_AVX512"],
    "avx512_vnni": ["-DEMULATE_AVX512", "-DEMULATE_VNNI"],
}
pytestmark = [needs_c, pytest.mark.skipif("avx2" not in build.available(), reason="no AVX2 here")]


def compiled(name: str, to: Path, *inputs: Path | str) -> Path:
    emulation = *build.TARGETS["avx2"].flags, f"-I{HERE / 'emulated'}", *SETS[name]
    command = ["cc", "-Wno-psabi", "-std=gnu11", "-pthread", *emulation, f"-I{build.FOLDER}"]
    subprocess.run([*command, *map(str, inputs), "-o", str(to), "-lm"], check=True)
    return to


@pytest.mark.parametrize("name", SETS)
def test_byte_products_are_those_of_the_definition(name: str, tmp_path: Path) -> None:
    program = compiled(name, tmp_path / "dot_bytes", "-O1", HERE / "dot_bytes.c")
    assert subprocess.run([program]).returncode == 0


@pytest.mark.parametrize("name", [name for name in SETS if name != "avx2"])
def test_linears_are_those_of_this_processor(name: str, tmp_path: Path) -> None:
    files = (build.FOLDER / f"{file}.c" for file in ("linear_int", "memory", "threads"))
    library = ctypes.CDLL(str(compiled(name, tmp_path / "linear.so", "-O0", "-shared", "-fPIC", *files)))
    backend, x = c_backend(), torch.randn(7, 96)
    for bits, offsets in ((8, False), (8, True), (4, False), (4, True)):
        values = torch.randint(-(2 ** (bits - 1)), 2 ** (bits - 1), (70, 96), dtype=torch.int8)
        weight = backend.pack(
            QuantizedWeight(values, torch.rand(70, 3), torch.randn(70, 3) if offsets else None, bits, 32)
        )
        y = torch.empty(7, 70)
        sizes = ctypes.c_int64(7), ctypes.c_int64(96), ctypes.c_void_p(y.data_ptr()), ctypes.c_int64(70)
        library.linear_int(ctypes.byref(weight.c), ctypes.c_void_p(structs.address(x)), *sizes, 0)
        assert torch.equal(y, backend.linear(x, weight)), (bits, offsets)
