"""Random streams of drafters and verification rules, as functions of (seed, sample, step, node).

Three independent streams: sampling draft tokens, accepting them, and sampling the token emitted instead.
Sharing one biases the output (block verification with shared draws: chi-square 905 on 80 degrees of freedom).
"""

from __future__ import annotations

import torch
from torch import Tensor

from outrider.core.noise import ACCEPT, DRAW, EMIT, uniform
from outrider.core.row import Row


def accept(row: Row, node: int, probability: float) -> bool:
    """Return True with this probability.  row.tokens must be those before the step."""
    return uniform(row.stream, ACCEPT, len(row.tokens), node) < probability


def emit(row: Row, node: int, distribution: Tensor) -> int:
    """Sample the token emitted after `node` from `distribution`, float64 [V]."""
    return index(distribution, uniform(row.stream, EMIT, len(row.tokens), node))


def children(row: Row, distribution: Tensor, nodes: range, repeats: bool = False) -> list[int]:
    """Sample a token for each of these sibling nodes from `distribution`, float64 [V].

    repeats: sample independently; otherwise without replacement, possibly fewer tokens than nodes.
    """
    stream, drawn = row.stream, []
    for node in nodes:
        if not distribution.sum() > 0:
            break
        drawn.append(index(distribution, uniform(stream, DRAW, len(row.tokens), node)))
        if not repeats:
            distribution = without(distribution, drawn[-1])
    return drawn


def index(distribution: Tensor, uniform: float) -> int:
    """Inverse transform sampling from `distribution`, float64 [V] of any positive sum."""
    sums = distribution.cumsum(0)
    token = int(torch.searchsorted(sums, sums[-1] * uniform, right=True))
    if token < len(distribution) and distribution[token] > 0:
        return token
    return min(token, int(distribution.nonzero()[-1]))


def index_on_device(distribution: Tensor, uniform: float) -> Tensor:
    """`index` as int64 [] where the distribution is, without a read."""
    sums, tokens = distribution.cumsum(0), torch.arange(len(distribution), device=distribution.device)
    last = tokens.where(distribution > 0, 0).amax()
    return torch.searchsorted(sums, sums[-1:] * uniform, right=True)[0].minimum(last)


def without(distribution: Tensor, token: int) -> Tensor:
    """Condition `distribution` on not being `token`.  Returns zeros if no other token has mass."""
    rest = distribution.clone()
    rest[token] = 0.0
    return normal(rest)


def normal(mass: Tensor) -> Tensor:
    """Normalize mass [V] >= 0 to sum 1.  Returns zeros unchanged."""
    total = mass.sum()
    return mass / total if total > 0 else mass
