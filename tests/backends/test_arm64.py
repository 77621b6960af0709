"""The kernels for arm64, by a cross compiler and qemu where they are installed (CONTRIBUTING.md)."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from outrider.backends.cpu import build

COMPILER, EMULATOR = "aarch64-linux-gnu-gcc", "qemu-aarch64-static"
SOURCES = Path(build.__file__).parent / "csrc"
pytestmark = pytest.mark.skipif(shutil.which(COMPILER) is None, reason=f"needs {COMPILER}")

# dot_bytes of int8.h, and its definition, on random bytes and on the extremes
DOT_BYTES = """
#include "int8.h"

int main(void) {
    uint64_t state = 1;
    for (int n = 0; n < 100000; n++) {
        vint sum, s, expected, nibbles = {0}, expected_nibbles = {0};
        vuint u;
        for (int i = 0; i < LANES; i++) {
            sum[i] = (int32_t)(splitmix64(state++) >> 36);
            u[i] = n % 7 ? (uint32_t)splitmix64(state++) : 0xffffffffu;
            s[i] = n % 5 ? (int32_t)splitmix64(state++) : (int32_t)0x80808080u;
            expected[i] = sum[i];
            for (int bit = 0; bit < 32; bit += 8) {
                const int32_t by = (int8_t)(s[i] >> bit & 255);
                expected[i] += ((int32_t)(u[i] >> bit & 255) - 128 - BYTE_START) * by;
                expected_nibbles[i] += (int32_t)(u[i] >> bit & 15) * by;
            }
        }
        sum = dot_bytes(sum, u, s);
        nibbles = sum_nibbles(dot_nibbles(nibbles, u & 0x0f0f0f0f, s));
        if (memcmp(&sum, &expected, sizeof sum)) return 1;
        if (memcmp(&nibbles, &expected_nibbles, sizeof nibbles)) return 2;
    }
    return 0;
}
"""


@pytest.fixture(
    params=[(), *(target.flags for target in build.ARM64.values())], ids=["portable", *build.ARM64]
)
def flags(request: pytest.FixtureRequest) -> list[str]:
    return list(request.param)


def test_every_kernel_compiles(flags: list[str]) -> None:
    sources = [str(path) for path in build.SOURCES]
    subprocess.run([COMPILER, *flags, *build.FLAGS, "-O0", "-fsyntax-only", "-Werror", *sources], check=True)


@pytest.mark.skipif(shutil.which(EMULATOR) is None, reason=f"needs {EMULATOR}")
def test_byte_products_are_those_of_the_definition(flags: list[str], tmp_path: Path) -> None:
    source, program = tmp_path / "dot.c", tmp_path / "dot"
    source.write_text(DOT_BYTES)
    subprocess.run(
        [COMPILER, "-O3", *flags, f"-I{SOURCES}", "-static", str(source), "-o", str(program), "-lm"],
        check=True,
    )
    assert subprocess.run([EMULATOR, "-cpu", "max", str(program)]).returncode == 0
