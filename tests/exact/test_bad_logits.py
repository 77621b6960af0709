"""Logits that are not numbers must not break the process: the sampler's C code indexes by them."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import torch
from outrider.backends.select import backend_for
from outrider.core.params import DistributionParams

kernels = backend_for(torch.device("cpu"), torch.float32)
for i in range(2000):
    torch.manual_seed(i)
    logits = torch.randn(300)
    logits[i % 300] = float("nan")
    tokens, _ = kernels.pick(logits, DistributionParams(0.8, {min_p}, {top_k}, {top_p}), 12345, 1, False)
    assert all(0 <= token < 300 for token in tokens)
"""


@pytest.mark.parametrize(
    ("min_p", "top_k", "top_p"), [(0.1, 0, 0.9), (0.0, 5, 0.9), (0.0, 0, 0.9), (0.1, 5, 1.0)]
)
def test_a_nan_among_the_logits(min_p: float, top_k: int, top_p: float) -> None:
    """In a process of its own, because it used to be killed for writing out of bounds."""
    program = PROGRAM.format(min_p=min_p, top_k=top_k, top_p=top_p)
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr[-500:]
