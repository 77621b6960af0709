"""Sampling distributions of rows of logits in float64: their sums, residuals and samples.

`backends/torch/sampling.py`, `verify/base.py` and `sampling/random_streams.py` are the reference.  Sums are
in another order than theirs, so probabilities differ from them by a few roundings, about 1e-16.

The target's distributions are not stored.  A mass is exp(distance from the highest logit), less what rejected
draft tokens have taken from it, one after the other: the record of each has the factors of p and q.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from outrider.backends.triton import sampling
from outrider.backends.triton.sampling import GOLDEN, LATEST, PART, Rows, _below, _mix, cuts_of

BLOCK = tl.constexpr(2048)  # tokens of a row at once
PARAMS = tl.constexpr(sampling.PARAMS)
WARPS = 8
# columns of `Targets.links`
LINKS = tl.constexpr(6)
TOKEN, PARENT, PROBS, CHILD, SIBLING, EARLIER = map(tl.constexpr, range(LINKS.value))
# columns of `Targets.records`
RECORD = tl.constexpr(5)
P_FACTOR, Q_FACTOR, MASS, SHARE, TOTAL = map(tl.constexpr, range(RECORD.value))
UNIT = tl.constexpr(2.0**-53)


class Targets(NamedTuple):
    """The target's distributions after the nodes of draft trees.  A node has the row of its logits.

    logits, highest, owners, params: as in `sampling.Rows`
    cuts:    float32 [M], the distance from which on filters leave tokens
    totals:  float64 [M], the sum of the masses of a row
    best:    int32 [M], the token of a greedy row; -1 for others
    links:   int64 [M, LINKS]: token, parent, address of q or 0 for a chosen token, first child, next sibling,
             and the sibling before it that was sampled from the same q without replacement; -1 for none
    records: float64 [M, RECORD], scratch: factors of p and q and the mass that is left when a rejected node
             has taken its q from p; acceptance probability and total of a node while a child is verified
    stride:  of the logits
    """

    logits: Tensor
    highest: Tensor
    owners: Tensor
    params: Tensor
    cuts: Tensor
    totals: Tensor
    best: Tensor
    links: Tensor
    records: Tensor
    stride: int
    vocabulary: int


@triton.jit
def _mass_below(low, cut):
    """Masses float64 of distances; most blocks have none if there is a filter."""
    mass = tl.zeros_like(low).to(tl.float64)
    if tl.max((low >= cut).to(tl.int32), 0) > 0:
        mass = tl.where(low >= cut, tl.exp(low.to(tl.float64)), 0.0)
    return mass


@triton.jit
def _mass(t, row, i):
    """Masses float64 of the tokens i of a row; 0 where a filter removes them."""
    reciprocal = tl.load(t.params + tl.load(t.owners + row * 2) * PARAMS + 1).to(tl.float32)
    low = _below(t, row, t.stride, i, t.vocabulary, tl.load(t.highest + row), reciprocal)
    best = tl.load(t.best + row)
    mass = (i == best).to(tl.float64)
    if best < 0:
        mass = _mass_below(low, tl.load(t.cuts + row))
    return mass


@triton.jit
def _sum_parts(t, parts, PART: tl.constexpr):
    """The sum of the masses of PART tokens; of a greedy row, the first token that has the highest logit."""
    row, part = tl.program_id(0), tl.program_id(1)
    tree = tl.load(t.owners + row * 2)
    if tree < 0:
        return
    greedy = tl.load(t.params + tree * PARAMS) == 0
    highest, cut = tl.load(t.highest + row), tl.load(t.cuts + row)
    reciprocal = tl.where(greedy, 1.0, tl.load(t.params + tree * PARAMS + 1)).to(tl.float32)
    total, best = tl.full((), 0.0, tl.float64), tl.full((), LATEST, tl.int32)
    for first in range(part * PART, tl.minimum(part * PART + PART, t.vocabulary), BLOCK):
        i = first + tl.arange(0, BLOCK)
        low = _below(t, row, t.stride, i, t.vocabulary, highest, reciprocal)
        if greedy:
            best = tl.minimum(best, tl.min(tl.where(low == 0, i, LATEST), 0))
        else:
            total += tl.sum(_mass_below(low, cut), 0)
    tl.store(parts + row * tl.num_programs(1) + part, tl.where(greedy, best.to(tl.float64), total))


@triton.jit
def _add_parts(t, parts, num_parts, PARTS: tl.constexpr):
    """Set the total and the best token of a row."""
    row, part = tl.program_id(0), tl.arange(0, PARTS)
    tree = tl.load(t.owners + row * 2)
    if tree < 0:
        return
    found = tl.load(parts + row * num_parts + part, mask=part < num_parts, other=0.0)
    first = tl.min(tl.where(part < num_parts, found, LATEST), 0).to(tl.int32)
    greedy = tl.load(t.params + tree * PARAMS) == 0
    tl.store(t.totals + row, tl.where(greedy, 1.0, tl.sum(found, 0)))
    tl.store(t.best + row, tl.where(greedy, first, -1))


@triton.jit
def _link(t, root, node):
    return t.links + (root + 1 + node) * LINKS


@triton.jit
def _record(t, root, node):
    return t.records + (root + 1 + node) * RECORD


@triton.jit
def _q(t, root, node, i):
    """What `node` was sampled from, float64, at the tokens i: 0 at its earlier siblings from there.

    Its sum is not 1 then.  A chosen token has all mass.
    """
    link = _link(t, root, node)
    address = tl.load(link + PROBS)
    probs = address.to(tl.pointer_type(tl.float64))
    q = tl.load(probs + i, mask=i < tl.where(address == 0, 0, t.vocabulary), other=0.0)
    q = tl.where(address == 0, (i == tl.load(link + TOKEN)).to(tl.float64), q)
    earlier = tl.load(link + EARLIER)
    while earlier >= 0:
        link = _link(t, root, earlier)
        q = tl.where(i == tl.load(link + TOKEN), 0.0, q)
        earlier = tl.load(link + EARLIER)
    return q


@triton.jit
def _sum_of_q(t, root, node):
    """The sum of `_q`; 1 if no sibling was sampled from there before."""
    total = tl.full((), 1.0, tl.float64)
    if tl.load(_link(t, root, node) + EARLIER) >= 0:
        total = tl.full((), 0.0, tl.float64)
        for first in range(0, t.vocabulary, BLOCK):
            total += tl.sum(_q(t, root, node, first + tl.arange(0, BLOCK)), 0)
        total = tl.where(total > 0, total, 1.0)
    return total


@triton.jit
def _residual(t, root, node, behind, i):
    """Masses of the target after `node` at the tokens i, less the q of its children before `behind`."""
    mass = _mass(t, root + 1 + node, i)
    child = tl.load(_link(t, root, node) + CHILD)
    while (child >= 0) & (child < behind):
        record = _record(t, root, child)
        taken = _q(t, root, child, i) * tl.load(record + Q_FACTOR)
        rest = tl.maximum(mass * tl.load(record + P_FACTOR) - taken, 0.0)
        mass = tl.where(tl.load(record + MASS) > 0, rest, mass)  # unless rounding leaves nothing
        child = tl.load(_link(t, root, child) + SIBLING)
    return mass


@triton.jit
def _ratio(t, root, node, child, total):
    """p(x) / q(x) of a child of `node`, whose children before it are rejected.  total: of p."""
    token = tl.load(_link(t, root, child) + TOKEN).to(tl.int32) + tl.arange(0, 1)
    p = tl.sum(_residual(t, root, node, child, token), 0)
    q = tl.sum(_q(t, root, child, token), 0)
    return (p / total) / (q / _sum_of_q(t, root, child))


@triton.jit
def _take(t, root, node, child, total, scale):
    """Reject a child of `node`: record the factors of [scale p - q]+, and return its mass."""
    p_factor, q_factor = scale / total, 1.0 / _sum_of_q(t, root, child)
    mass = tl.full((), 0.0, tl.float64)
    for first in range(0, t.vocabulary, BLOCK):
        i = first + tl.arange(0, BLOCK)
        p, q = _residual(t, root, node, child, i), _q(t, root, child, i)
        mass += tl.sum(tl.maximum(p * p_factor - q * q_factor, 0.0), 0)
    record = _record(t, root, child)
    tl.store(record + P_FACTOR, p_factor)
    tl.store(record + Q_FACTOR, q_factor)
    tl.store(record + MASS, mass)
    tl.debug_barrier()  # one thread writes, and all of the program read
    return mass


@triton.jit
def _uniform(key, node):
    """`core.noise.uniform` of a node; key: of the other arguments."""
    bits = _mix(key.to(tl.uint64) + (node + 2).to(tl.uint64) * GOLDEN) >> 11
    return bits.to(tl.float64) * UNIT


@triton.jit
def _draw(t, root, node, behind, total, uniform):
    """`random_streams.index` of `_residual`, whose sum is `total`."""
    goal, before = total * uniform, tl.full((), 0.0, tl.float64)
    token, first = tl.full((), 0, tl.int32), tl.full((), 0, tl.int32)
    while first < t.vocabulary:
        i = first + tl.arange(0, BLOCK)
        mass = _residual(t, root, node, behind, i)
        token = tl.maximum(
            token, tl.max(tl.where(mass > 0, i, 0), 0)
        )  # the last one, if rounding leaves none
        after = before + tl.sum(mass, 0)
        first += BLOCK
        if after > goal:
            reached = (before + tl.cumsum(mass, 0) > goal) & (mass > 0)
            token = tl.minimum(token, tl.min(tl.where(reached, i, LATEST), 0))
            first = tl.maximum(first, t.vocabulary)
        before = after
    return token


@triton.jit
def _sample(t, samples, tokens, width):
    """Replace the token of a row by a sample, and store what it was sampled from, padded to `width`.

    samples: int64 [M, 2], the address for that, 0 for a row that is not sampled, and the bits of a uniform
    """
    row = tl.program_id(0)
    address = tl.load(samples + row * 2)
    if (address == 0) | (tl.load(tokens + row) < 0):
        return
    total, uniform = tl.load(t.totals + row), tl.load(samples + row * 2 + 1).to(tl.float64, bitcast=True)
    tl.store(tokens + row, _draw(t, row, -1, 0, total, uniform))
    kept = address.to(tl.pointer_type(tl.float64))
    for first in range(0, width, BLOCK):
        i = first + tl.arange(0, BLOCK)
        tl.store(kept + i, _mass(t, row, i) / total, mask=i < width)


def sample(
    logits: Tensor, owners: Tensor, params: Tensor, samples: Tensor, tokens: Tensor, width: int
) -> None:
    """Replace the tokens int64 [M] that `_sample` is asked for; -1 stays."""
    rows, links = (
        Rows(logits, logits.amax(-1), owners, params),
        owners.new_full((len(tokens), LINKS.value), -1),
    )
    _sample[(len(tokens),)](
        targets_of(rows, links), samples, tokens, width, num_warps=WARPS, enable_fp_fusion=False
    )


def targets_of(rows: Rows, links: Tensor) -> Targets:
    """The distributions of rows of logits that have these links."""
    (m, vocabulary), device = rows.logits.shape, rows.logits.device
    num_parts = triton.cdiv(vocabulary, PART)
    totals, best = rows.params.new_empty(m), torch.empty(m, dtype=torch.int32, device=device)
    records, parts = totals.new_empty(m, RECORD.value), totals.new_empty(m, num_parts)
    widths = rows.logits.stride(0), vocabulary
    targets = Targets(*rows, cuts_of(rows), totals, best, links, records, *widths)
    _sum_parts[(m, num_parts)](targets, parts, PART=PART, enable_fp_fusion=False)
    _add_parts[(m,)](
        targets, parts, num_parts, PARTS=triton.next_power_of_2(num_parts), enable_fp_fusion=False
    )
    return targets
