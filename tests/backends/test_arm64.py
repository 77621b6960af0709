"""The kernels for arm64, by a cross compiler and qemu where they are installed (CONTRIBUTING.md)."""

from __future__ import annotations

import platform
import shutil
import subprocess
from pathlib import Path

import pytest
from neon import EMULATED

from outrider.backends.cpu import build, targets

COMPILER, EMULATOR = "aarch64-linux-gnu-gcc", "qemu-aarch64-static"
SOURCES = Path(build.__file__).parent / "csrc"
pytestmark = pytest.mark.skipif(shutil.which(COMPILER) is None, reason=f"needs {COMPILER}")


@pytest.fixture(
    params=[(), *(target.flags for target in targets.ARM64.values())], ids=["portable", *targets.ARM64]
)
def flags(request: pytest.FixtureRequest) -> list[str]:
    return list(request.param)


def test_every_kernel_compiles(flags: list[str]) -> None:
    sources = [str(path) for path in build.SOURCES]
    subprocess.run([COMPILER, *flags, *build.FLAGS, "-O0", "-fsyntax-only", "-Werror", *sources], check=True)


@pytest.mark.skipif(shutil.which(EMULATOR) is None, reason=f"needs {EMULATOR}")
def test_byte_products_are_those_of_the_definition(flags: list[str], tmp_path: Path) -> None:
    source, program = Path(__file__).with_name("dot_bytes.c"), tmp_path / "dot"
    subprocess.run(
        [COMPILER, "-O3", *flags, f"-I{SOURCES}", "-static", str(source), "-o", str(program), "-lm"],
        check=True,
    )
    assert subprocess.run([EMULATOR, "-cpu", "max", str(program)]).returncode == 0


@pytest.mark.skipif(shutil.which(EMULATOR) is None, reason=f"needs {EMULATOR}")
@pytest.mark.skipif(platform.machine() != "x86_64", reason="emulated on x86-64")
def test_bfdot_gives_the_bits_of_the_emulated_one(tmp_path: Path) -> None:
    source, real, emulated = Path(__file__).with_name("bfdot.c"), tmp_path / "real", tmp_path / "emulated"
    cross = [COMPILER, *targets.ARM64["neon_bf16"].flags, "-static"]
    for command, program in ((cross, real), (["cc", *EMULATED], emulated)):
        subprocess.run([*command, "-O2", f"-I{SOURCES}", str(source), "-o", str(program), "-lm"], check=True)
    expected = subprocess.run([emulated], capture_output=True, check=True).stdout
    assert len(set(expected.split())) > 10000
    got = subprocess.run([EMULATOR, "-cpu", "max", real], capture_output=True, check=True).stdout
    assert got == expected
