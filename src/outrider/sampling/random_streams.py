"""Random choices that are functions of (seed, sample, step, node): what drafters draw guesses with and rules decide with.

Three streams that share nothing: drawing guesses, accepting them, drawing what is emitted instead.  Sharing one between the
two sides biases what is emitted (block verification with shared draws: a chi-square of 905 on 80 degrees of freedom).
"""

from __future__ import annotations

import torch
from torch import Tensor

from outrider.core.noise import ACCEPT, DRAW, EMIT, stream_of, uniform
from outrider.core.row import Row


def accept(row: Row, node: int, probability: float) -> bool:
    """True with this probability.  The row's tokens are those before the step."""
    return uniform(stream_of(row.seed, row.index), ACCEPT, len(row.tokens), node) < probability


def emit(row: Row, node: int, distribution: Tensor) -> int:
    """A token from `distribution`, float64 [V], after `node`."""
    return index(distribution, uniform(stream_of(row.seed, row.index), EMIT, len(row.tokens), node))


def children(row: Row, distribution: Tensor, nodes: range, repeats: bool = False) -> list[int]:
    """A token for each of the nodes, siblings, drawn from `distribution`; fewer where it runs out of tokens that were not drawn before."""
    stream, drawn = stream_of(row.seed, row.index), []
    for node in nodes:
        if not distribution.sum() > 0:
            break
        drawn.append(index(distribution, uniform(stream, DRAW, len(row.tokens), node)))
        if not repeats:
            distribution = without(distribution, drawn[-1])
    return drawn


def index(distribution: Tensor, uniform: float) -> int:
    """The token where the cumulated law, float64 [V] of any positive sum, passes `uniform`."""
    sums = distribution.cumsum(0)
    token = int(torch.searchsorted(sums, sums[-1] * uniform, right=True))
    return (
        min(token, int(distribution.nonzero()[-1]))
        if token >= len(distribution) or not distribution[token] > 0
        else token
    )


def without(distribution: Tensor, token: int) -> Tensor:
    """The law given that it is not `token`; zeros if there is nothing else."""
    rest = distribution.clone()
    rest[token] = 0.0
    return normal(rest)


def normal(mass: Tensor) -> Tensor:
    """mass [V] >= 0 as a distribution; zeros stay zeros."""
    total = mass.sum()
    return mass / total if total > 0 else mass
