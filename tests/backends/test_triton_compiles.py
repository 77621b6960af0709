"""The Triton kernels compile for CUDA devices, without one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from interpreted import needs_triton

SUPPORT = Path(__file__).parents[1] / "support"


@needs_triton
@pytest.mark.full
@pytest.mark.parametrize("capability", [80, 90])
def test_every_kernel_compiles(capability: int, tmp_path: Path) -> None:
    environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path)}
    environment.pop("TRITON_INTERPRET", None)
    command = [sys.executable, str(SUPPORT / "compile_triton.py"), str(capability)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    kernels = {
        "_linear",
        "_rms_norm",
        "_silu_mul",
        "_rope_store",
        "_sum_split",
        "_add_splits",
        "_cut",
        "_best",
    }
    assert {*done.stdout.split()} == {*kernels, "_score", "_walk"}
