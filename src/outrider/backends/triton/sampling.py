"""Picks from rows of logits: the cut of the filters, the noise, and the best token of each part of a row.

`core/noise.py` and `backends/torch/sampling.py` are the reference.  Scores are the same numbers, so the
kernels are launched without fused multiply-add.
"""

from __future__ import annotations

import math
import struct
from array import array
from functools import lru_cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from outrider.core.params import DistributionParams

PART, BLOCK = 8192, 1024  # logits of a program of `_best`, and at once
WIDE = 4096  # logits of a row at once, where its cut is looked for
PARAMS = 6  # numbers of `params_of`
MIX_1, MIX_2 = tl.constexpr(0xBF58476D1CE4E5B9), tl.constexpr(0x94D049BB133111EB)
GOLDEN = tl.constexpr(0x9E3779B97F4A7C15)
INFINITY = tl.constexpr(0x7F800000)  # bits of a float32
LATEST = tl.constexpr(0x7FFFFFFF)  # after every token


@lru_cache(maxsize=1024)
def params_of(distribution: DistributionParams, vocabulary: int) -> tuple[float, ...]:
    """Temperature, its float32 reciprocal, log(min_p), top_k, top_p, and whether any filter is in force.

    0 for top_k and 2 for top_p turn a filter off.
    """
    temperature, min_p, top_k, top_p = distribution
    if temperature == 0:
        return 0.0, 0.0, -math.inf, 0.0, 2.0, 0.0
    reciprocal: float = 1 / struct.unpack("f", struct.pack("f", temperature))[0]
    least = math.log(min_p) if min_p > 0 else -math.inf
    top_k = top_k if top_k < vocabulary else 0
    top_p = top_p if top_p < 1 else 2.0
    return temperature, reciprocal, least, float(top_k), top_p, float(min_p > 0 or top_k > 0 or top_p < 1)


@lru_cache(maxsize=1024)
def param_bytes(distribution: DistributionParams, vocabulary: int) -> bytes:
    """`params_of` as float64 numbers."""
    return array("d", params_of(distribution, vocabulary)).tobytes()


class Rows(NamedTuple):
    """Rows of logits to pick from.

    logits:  float32 [M, V]
    highest: float32 [M], the largest of each
    owners:  int64 [M, 2], the tree of a row, -1 for none, and the 64-bit key of its noise
    params:  float64 [T, PARAMS]
    """

    logits: Tensor
    highest: Tensor
    owners: Tensor
    params: Tensor


@triton.jit
def _mix(z):
    """`core.noise.mix` of uint64."""
    z = (z ^ (z >> 30)) * MIX_1
    z = (z ^ (z >> 27)) * MIX_2
    return z ^ (z >> 31)


@triton.jit
def _below(rows, row, stride, i, vocabulary, highest, reciprocal):
    """Distances of the logits i of a row from its highest, at temperature; -inf past the vocabulary."""
    x = tl.load(rows.logits + row.to(tl.int64) * stride + i, mask=i < vocabulary, other=float("-inf"))
    return (x - highest) * reciprocal


@triton.jit
def _negative(bits):
    """The negative float32 of an absolute value's bits."""
    return -bits.to(tl.float32, bitcast=True)


@triton.jit
def _lowest(
    rows, row, stride, vocabulary, highest, reciprocal, least, limit, COUNT: tl.constexpr, WIDE: tl.constexpr
):
    """The lowest number x such that fewer than `limit` of the distances from `least` on are above it.

    COUNT: 0 weighs them by their probability.
    x is found two bits at a time: floats of one sign grow with their bits.
    """
    lowest = tl.full((), 0, tl.int32)
    for step in range(16):
        unit = tl.full((), 1, tl.int32) << (30 - 2 * step)
        above_1 = tl.zeros((WIDE,), tl.float64)
        above_2, above_3 = tl.zeros((WIDE,), tl.float64), tl.zeros((WIDE,), tl.float64)
        for first in range(0, vocabulary, WIDE):
            low = _below(rows, row, stride, first + tl.arange(0, WIDE), vocabulary, highest, reciprocal)
            weight = tl.where(low >= least, tl.exp(low) if COUNT == 0 else 1.0, 0.0)
            above_1 += tl.where(low > _negative(lowest + unit), weight, 0.0).to(tl.float64)
            above_2 += tl.where(low > _negative(lowest + 2 * unit), weight, 0.0).to(tl.float64)
            above_3 += tl.where(low > _negative(lowest + 3 * unit), weight, 0.0).to(tl.float64)
        # Each sum is at least the one before.  Bits beyond all finite numbers are a NaN, above which nothing
        # is; so far below the best, no token has weight.
        digit = (tl.sum(above_1, 0) < limit).to(tl.int32)
        if step > 0:  # the highest bit is the sign
            digit += (tl.sum(above_2, 0) < limit).to(tl.int32) + (tl.sum(above_3, 0) < limit).to(tl.int32)
        lowest += digit * unit
    return _negative(tl.minimum(lowest, INFINITY))


@triton.jit
def _cut(rows, cuts, stride, vocabulary, PARAMS: tl.constexpr, WIDE: tl.constexpr):
    """The distance from which on min_p, top_k and top_p leave the tokens of one row."""
    row = tl.program_id(0)
    tree = tl.load(rows.owners + row * 2)
    if tree < 0:
        return
    params = rows.params + tree * PARAMS
    least = tl.load(params + 2).to(tl.float32)
    if tl.load(params + 5) > 0:
        highest, reciprocal = tl.load(rows.highest + row), tl.load(params + 1).to(tl.float32)
        top_k, top_p = tl.load(params + 3), tl.load(params + 4)
        if top_k > 0:
            cut = _lowest(rows, row, stride, vocabulary, highest, reciprocal, least, top_k, 1, WIDE)
            least = tl.maximum(least, cut)
        if top_p < 1:
            whole = tl.zeros((WIDE,), tl.float64)
            for first in range(0, vocabulary, WIDE):
                low = _below(rows, row, stride, first + tl.arange(0, WIDE), vocabulary, highest, reciprocal)
                whole += tl.where(low >= least, tl.exp(low), 0.0).to(tl.float64)
            limit = top_p * tl.sum(whole, 0)
            cut = _lowest(rows, row, stride, vocabulary, highest, reciprocal, least, limit, 0, WIDE)
            least = tl.maximum(least, cut)
    tl.store(cuts + row, least)


@triton.jit
def _noise_bits(key, token):
    """The 24 bits of a token's uniform, as in `core.noise.gumbel`."""
    return (_mix(key + (token + 1).to(tl.uint64) * GOLDEN) >> 40).to(tl.int32)


@triton.jit
def _gumbel(bits):
    """Noise float32 of 24 bits; logarithms in float64."""
    uniform = (bits.to(tl.float64) + 0.5) * 5.9604644775390625e-08
    return (-tl.log(-tl.log(uniform))).to(tl.float32)


@triton.jit
def _noise_bound(bits):
    """Float32 that the noise of 24 bits does not exceed: -log(1 - u), with a margin for rounding."""
    return 16.636 - tl.log((16777216 - bits).to(tl.float32) - 0.5)  # 24 log(2) = 16.6355


@triton.jit
def _first_best(scores, tokens, best, token):
    """The better of the best of `scores` and (best, token); the first of equal ones."""
    found = tl.max(scores, 0)
    where = tl.min(tl.where(scores == found, tokens, LATEST), 0)
    return tl.where(found > best, found, best), tl.where(found > best, where, token)


@triton.jit
def _best(
    rows, cuts, scores, tokens, stride, vocabulary, PARAMS: tl.constexpr, PART: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Score and token of the best of PART logits of a row.

    Noise and its float64 logarithms are computed only for blocks in which its bound could win.
    """
    row, part = tl.program_id(0), tl.program_id(1)
    tree = tl.load(rows.owners + row * 2)
    if tree < 0:
        return
    highest, reciprocal = tl.load(rows.highest + row), tl.load(rows.params + tree * PARAMS + 1).to(tl.float32)
    greedy = tl.load(rows.params + tree * PARAMS) == 0
    reciprocal, cut = tl.where(greedy, 1.0, reciprocal), tl.load(cuts + row)
    key = tl.load(rows.owners + row * 2 + 1).to(tl.uint64)
    best, token = tl.full((), float("-inf"), tl.float32), tl.full((), 0, tl.int32)
    for first in range(part * PART, tl.minimum(part * PART + PART, vocabulary), BLOCK):
        i = first + tl.arange(0, BLOCK)
        low = _below(rows, row, stride, i, vocabulary, highest, reciprocal)
        low = tl.where(low < cut, float("-inf"), low)
        if greedy:
            best, token = _first_best(low, i, best, token)
        else:
            bits = _noise_bits(key, i)
            if tl.max(low + _noise_bound(bits), 0) >= best:
                best, token = _first_best(low + _gumbel(bits), i, best, token)
    at = row * tl.num_programs(1) + part
    tl.store(scores + at, best)
    tl.store(tokens + at, token)


def cuts_of(rows: Rows) -> Tensor:
    """The cut of each row, float32 [M]; unset for a row without a tree."""
    m, vocabulary = rows.logits.shape
    cuts, stride = torch.empty_like(rows.highest), rows.logits.stride(0)
    _cut[(m,)](
        rows, cuts, stride, vocabulary, PARAMS=PARAMS, WIDE=WIDE, num_warps=8, enable_fp_fusion=False,
    )  # fmt: skip
    return cuts


def best_of_parts(rows: Rows, cuts: Tensor) -> tuple[Tensor, Tensor]:
    """Scores float32 and tokens int32 [M, parts]; the best of a row is the best of its parts.

    cuts: of `cuts_of`.
    """
    m, vocabulary = rows.logits.shape
    parts = triton.cdiv(vocabulary, PART)
    scores = rows.highest.new_empty(m, parts)
    tokens = torch.empty(m, parts, dtype=torch.int32, device=scores.device)
    _best[(m, parts)](
        rows, cuts, scores, tokens, rows.logits.stride(0), vocabulary, PARAMS=PARAMS, PART=PART,
        BLOCK=BLOCK, enable_fp_fusion=False,
    )  # fmt: skip
    return scores, tokens


def first_of_best(scores: Tensor, k: int) -> Tensor:
    """Columns of the k best float32 scores of each row, best first, of equal ones the first.

    `topk` takes any of equal ones.  So it gets numbers that differ: the bits of a score, which are ordered as
    the scores are once those of negative ones are flipped, and below them the column.
    """
    last = scores.shape[1] - 1
    if k == 1:
        columns = torch.arange(last + 1, device=scores.device)
        return columns.masked_fill(scores != scores.amax(-1, keepdim=True), last).amin(-1, keepdim=True)
    bits = (scores + 0.0).view(torch.int32)  # -0 becomes 0
    ordered = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).long() << 32
    keys = ordered + torch.arange(last, -1, -1, device=scores.device)
    return last - (keys.topk(k, dim=-1).values & 0xFFFFFFFF)
