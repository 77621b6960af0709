"""What linears with rounded inputs compute, by the definitions of pairs.h and tiles.h, in numpy."""

from __future__ import annotations

import numpy as np
import torch
from kernel_cases import c_backend
from torch import Tensor

SMALLEST = float(np.finfo(np.float32).tiny)
TILE_INPUTS = 32


def hard_numbers(*shape: int) -> Tensor:
    """Random bits: magnitudes whose products and sums are subnormal, cancel or overflow."""
    signs, mantissas = torch.randint(2, shape), torch.randint(128, shape)
    middle = torch.tensor([4, 40, 64, 127, 188])[torch.randint(5, (shape[0], 1))]
    exponents = (middle + torch.randint(-4, 5, shape)).clamp(0, 254)
    return ((signs << 15 | exponents << 7 | mantissas).int() << 16).view(torch.float32)


def flushed(x: np.ndarray) -> np.ndarray:
    """float64 rounded to float32; zero where that, with 24 bits, is below the smallest normal number."""
    numbers = np.where(np.abs(x) < SMALLEST * (1 - 2.0**-25), np.copysign(0, x), x)
    return numbers.astype(np.float32)


def fused(sums: np.ndarray, x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    """sums [rows,outputs] + x [rows] * weight [outputs]; float64 holds it, so it is rounded once."""
    return flushed(np.multiply.outer(x, weight) + sums.astype(np.float64))


def rounded(x: Tensor, multiple: int) -> np.ndarray:
    """x in bfloat16, without its subnormal numbers, padded with zeros to a multiple of inputs."""
    padded = torch.nn.functional.pad(x.bfloat16(), (0, -x.shape[1] % multiple))
    return flushed(padded.double().numpy()).astype(np.float64)


def by_pairs(x: Tensor, weight: Tensor) -> Tensor:
    """One sum in float32, inputs 1, 0, 3, 2 ..."""
    ours, theirs = rounded(x, 2), rounded(weight, 2)
    sums = np.zeros((len(ours), len(theirs)), np.float32)
    for k in (i ^ 1 for i in range(ours.shape[1])):
        sums = fused(sums, ours[:, k], theirs[:, k])
    return torch.from_numpy(sums)


def by_tiles(x: Tensor, weight: Tensor) -> Tensor:
    """For every 32 inputs a sum of the even ones, one of the odd ones, and both added to the rest."""
    ours, theirs = rounded(x, TILE_INPUTS), rounded(weight, TILE_INPUTS)
    sums = np.zeros((len(ours), len(theirs)), np.float32)
    for first in range(0, ours.shape[1], TILE_INPUTS):
        halves = [np.zeros_like(sums), np.zeros_like(sums)]
        for k in range(first, first + TILE_INPUTS):
            halves[k % 2] = fused(halves[k % 2], ours[:, k], theirs[:, k])
        both = flushed(halves[0].astype(np.float64) + halves[1])
        sums = flushed(sums.astype(np.float64) + both)
    return torch.from_numpy(sums)


@np.errstate(over="ignore", invalid="ignore")
def odd(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """a + b of float32 numbers, cut off to float32; its last bit is set unless that is exact."""
    a, b = a.astype(np.float64), b.astype(np.float64)
    sums = a + b
    part = sums - a
    rest = (a - (sums - part)) + (b - part)  # sums + rest is exact
    cut = np.isfinite(sums) & (rest != 0) & (sums.view(np.int64) & 1 == 0)
    sums = (sums.view(np.int64) + cut * np.where((rest > 0) == (sums > 0), 1, -1)).view(np.float64)
    near = sums.astype(np.float32)
    bits = near.view(np.int32) - (np.abs(near) > np.abs(sums)) | (near != sums)
    numbers = np.where(np.abs(sums) < 2.0**128, bits.astype(np.int32).view(np.float32), near)
    return flushed(numbers.astype(np.float64))


def by_bfdot(x: Tensor, weight: Tensor) -> Tensor:
    """One sum; the products of inputs 0 and 1 are added first, then those of 2 and 3 ..."""
    ours, theirs = rounded(x, 2), rounded(weight, 2)
    sums = np.zeros((len(ours), len(theirs)), np.float32)
    for k in range(0, ours.shape[1], 2):
        with np.errstate(over="ignore"):
            even, last = (flushed(np.multiply.outer(ours[:, i], theirs[:, i])) for i in (k, k + 1))
        sums = odd(sums, odd(even, last))
    return torch.from_numpy(sums)


def by_definition(x: Tensor, weight: Tensor) -> Tensor:
    """As the compiled kernels sum."""
    library = c_backend().lib
    if library.has_bfdot():
        return by_bfdot(x, weight)
    return (by_tiles if library.has_bfloat16_tiles() else by_pairs)(x, weight)
