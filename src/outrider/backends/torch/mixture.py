"""A mixture of experts in torch."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from outrider.backends.base import Backend
from outrider.backends.layer import LayerExperts


class Ops(Backend, Protocol):
    """A backend with what enters the `down` of an MLP."""

    def silu_mul(self, x: Tensor) -> Tensor: ...


def outputs(backend: Ops, x: Tensor, experts: LayerExperts) -> Tensor:
    """The weighted sum [n, h] of every row's experts, by number, each computed for all of its rows."""
    probs = torch.softmax(backend.linear(x, experts.router).float(), dim=-1)
    weights, chosen = probs.topk(experts.chosen)
    if experts.normalized:
        weights = weights / weights.sum(-1, keepdim=True)
    total = torch.zeros_like(x)
    for expert in sorted({*chosen.flatten().tolist()}):
        rows, rank = (chosen == expert).nonzero(as_tuple=True)
        inner = _gated(backend, backend.linear(x[rows], experts.gate_up[expert]), experts)
        y = backend.linear(inner, experts.down[expert]) * weights[rows, rank, None].to(x)
        total[rows] = total[rows] + y
    return total


def _gated(backend: Ops, x: Tensor, experts: LayerExperts) -> Tensor:
    """What enters `down`.  Row by row where torch computes the last elements of a call in another way."""
    if not (limit := experts.gate_limit):
        return backend.silu_mul(x)
    gate, up = x.chunk(2, dim=-1)
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    shares = torch.stack([torch.sigmoid(row * experts.gate_slope) for row in gate])
    return gate * shares * (up + 1)
