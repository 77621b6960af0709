"""Features of draft tokens: one program a row, in place of some fifteen operations of `core/stop_rule.py`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from outrider.core.stop_rule import NUM_FEATURES, TOP

WIDE = 4096  # logits of a row at once
LAST = tl.constexpr(0x7FFFFFFF)  # beyond every column


@triton.jit
def _next_best(row, vocabulary, best, column, WIDE: tl.constexpr):
    """The first of the largest logits of a row behind (best, column), and its column."""
    i = tl.arange(0, WIDE)
    found, where = tl.full((WIDE,), float("-inf"), tl.float32), tl.full((WIDE,), LAST, tl.int32)
    for first in range(0, vocabulary, WIDE):
        x = tl.load(row + first + i, mask=first + i < vocabulary, other=float("-inf"))
        behind = (x < best) | ((x == best) & (first + i > column))
        better = behind & (x > found)
        found, where = tl.where(better, x, found), tl.where(better, first + i, where)
    highest = tl.max(found, 0)
    return highest, tl.min(tl.where(found == highest, where, LAST), 0)


@triton.jit
def _features(
    logits, temperatures, tokens, features, stride, vocabulary, WIDE: tl.constexpr, TOP: tl.constexpr
):
    """The features of one row (`core.stop_rule.NodeFeatures`)."""
    n, i = tl.program_id(0), tl.arange(0, WIDE)
    row, to = logits + n.to(tl.int64) * stride, features + n * (2 + TOP)
    reciprocal = (1.0 / tl.load(temperatures + n)).to(tl.float32)
    highest, column = _next_best(row, vocabulary, float("inf"), -1, WIDE)
    mass, weighted = tl.zeros((WIDE,), tl.float64), tl.zeros((WIDE,), tl.float64)
    for first in range(0, vocabulary, WIDE):
        x = tl.load(row + first + i, mask=first + i < vocabulary, other=float("-inf"))
        low = (x - highest) * reciprocal
        weight = tl.exp(low)
        mass += weight.to(tl.float64)
        weighted += tl.where(weight > 0, weight * low, 0.0).to(tl.float64)
    total = tl.sum(mass, 0)
    own = (tl.load(row + tl.load(tokens + n)) - highest) * reciprocal
    tl.store(to, tl.exp(own).to(tl.float64) / total)
    tl.store(to + 1, tl.log(total) - tl.sum(weighted, 0) / total)
    tl.store(to + 2, 1.0 / total)
    best = highest
    for k in range(1, TOP):
        best, column = _next_best(row, vocabulary, best, column, WIDE)
        share = tl.exp((best - highest) * reciprocal).to(tl.float64) / total
        tl.store(to + 2 + k, tl.where(k < vocabulary, share, 0.0))


def features_of(logits: Tensor, temperatures: Tensor, tokens: Tensor) -> Tensor:
    """`core.stop_rule.features_of`, to within rounding of float32.

    logits: float32 [n, V], columns side by side.  temperatures: float64 [n].  tokens: int64 [n].
    """
    n, vocabulary = logits.shape
    features = torch.empty(n, NUM_FEATURES, dtype=torch.float64, device=logits.device)
    _features[(n,)](
        logits, temperatures, tokens, features, logits.stride(0), vocabulary, WIDE=WIDE, TOP=TOP, num_warps=8,
        enable_fp_fusion=False,
    )  # fmt: skip
    return features
