"""Gumbel noise of the random streams: the same in torch, C and Python."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kernel_cases import c_backend, needs_c

from outrider.core.noise import GOLDEN, MASK, gumbel, key_of, mix
from outrider.core.params import DistributionParams


def python_gumbel(key: int, token: int) -> float:
    bits = mix((key + (token + 1) * GOLDEN) & MASK) >> 40
    return -math.log(-math.log((bits + 0.5) * 2.0**-24))


@given(st.integers(0, MASK))
def test_noise_in_torch_is_the_formula(key: int) -> None:
    noise = gumbel(key, 50)
    assert noise.dtype == torch.float32
    assert noise.tolist() == pytest.approx(
        [python_gumbel(key, token) for token in range(50)], rel=2e-7, abs=1e-9
    )


@needs_c
@pytest.mark.parametrize("seed", range(20))
def test_noise_in_c_is_the_formula(seed: int) -> None:
    """With flat logits the ranking is the noise's own."""
    key = key_of(seed, 0, 7)
    best, _ = c_backend().pick(torch.zeros(5000), DistributionParams(), key, 64, False)
    noise = [python_gumbel(key, token) for token in range(5000)]
    assert best == sorted(range(5000), key=lambda t: -noise[t])[:64]


def test_keys_differ_in_every_part_and_noise_is_gumbel() -> None:
    keys = {
        key_of(seed, index, position)
        for seed in (0, 1, -1, 2**63)
        for index in range(4)
        for position in range(50)
    }
    assert len(keys) == 4 * 4 * 50
    noise = torch.cat([gumbel(key, 1000) for key in list(keys)[:100]]).double()
    assert noise.isfinite().all()
    assert noise.mean().item() == pytest.approx(0.57722, abs=0.02)
    assert noise.var().item() == pytest.approx(math.pi**2 / 6, abs=0.05)


def test_a_token_has_the_same_noise_in_any_vocabulary() -> None:
    assert torch.equal(gumbel(5, 100), gumbel(5, 1000)[:100])
