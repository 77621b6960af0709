"""The Triton kernels compile for CUDA devices, without one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from interpreted import needs_triton

SUPPORT = Path(__file__).parents[1] / "support"
NAMES = {
    "_linear",
    "_rms_norm",
    "_act_mul",
    "_soft_cap",
    "_route",
    "_count",
    "_sort",
    "_linear_of_experts",
    "_add_pairs",
    "_rope_store",
    "_sum_split",
    "_add_splits",
    "_cut",
    "_best",
    "_mask",
    "_edit",
    "_filter",
    "_score",
    "_walk",
    "_sample",
    "_sum_parts",
    "_add_parts",
    "_rejection",
    "_block",
    "_traversal",
    "_features",
}


def printed(script: str, capability: int, cache: Path) -> str:
    environment = {**os.environ, "TRITON_CACHE_DIR": str(cache)}
    environment.pop("TRITON_INTERPRET", None)
    command = [sys.executable, str(SUPPORT / script), str(capability)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


@needs_triton
@pytest.mark.parametrize("capability", [80, 90])
def test_keys_of_paths_and_of_tables_are_summed_in_one_layout(capability: int, tmp_path: Path) -> None:
    lines = printed("triton_layouts.py", capability, tmp_path).splitlines()
    assert len(lines) == 6 and all(line.endswith(" same") for line in lines), lines


@needs_triton
@pytest.mark.full
@pytest.mark.parametrize("capability", [80, 90])
def test_every_kernel_compiles(capability: int, tmp_path: Path) -> None:
    assert {*printed("compile_triton.py", capability, tmp_path).split()} == NAMES
