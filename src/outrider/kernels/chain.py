"""A chain of guesses in one call, and when it ends before its last level: as the C kernels and torch decide it."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from torch import Tensor

if TYPE_CHECKING:
    from outrider.kernels import Chain

TOP = 4
TRAITS = TOP + 2

Traits = list[float]  # of a guess: its probability, the entropy of its law, the TOP largest probabilities there
Chained = tuple[list[list[int]], list[list[Traits]]]  # the tokens of each chain, and their traits where something may halt it


class Halt(NamedTuple):
    """No guess is made behind one that is less likely than `least`, whose law has more entropy than `most`, or that `net` doubts.

    net: float32, flat: [hidden, TRAITS + 1] weights (for the traits and the level, which counts from 0), [hidden] biases, then
    ReLU, [hidden] weights, [1] bias; below 0 it doubts.
    """

    least: float = 0.0
    most: float = math.inf
    net: Tensor | None = None


class _Chain(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_long) for name in ("at", "levels", "top_k")),
        *((name, ctypes.c_double) for name in ("min_p", "top_p")),
        ("stream", ctypes.c_uint64),
        *((name, ctypes.c_float) for name in ("temperature", "floor")),
    ]


class Rule(ctypes.Structure):
    """`Halt` of simd.h; it points into halt.net, which the caller keeps alive."""

    _fields_ = [
        *((name, ctypes.c_double) for name in ("least", "most")),
        ("net", ctypes.c_void_p),
        ("hidden", ctypes.c_long),
    ]

    @classmethod
    def of(cls, halt: Halt) -> Rule:
        net = halt.net
        return cls(halt.least, halt.most, None if net is None else net.data_ptr(), 0 if net is None else hidden_of(net))


class Room:
    """What `chain` in kernels.c reads of the chains, and where it puts what it finds."""

    def __init__(self, chains: Sequence[Chain], halt: Halt | None) -> None:
        self.most = max(chain.levels for chain in chains)
        self.chains = (_Chain * len(chains))()
        for to, (at, levels, law, stream, floor) in zip(self.chains, chains):
            to.at, to.levels, to.stream, to.floor = at, levels, stream, floor
            to.temperature, to.min_p, to.top_k, to.top_p = law
        self.out = (ctypes.c_int32 * (len(chains) * self.most))()
        self.rule = None if halt is None else Rule.of(halt)
        self.traits = None if halt is None else (ctypes.c_float * (len(self.out) * TRAITS))()

    def read(self) -> Chained:
        most = self.most
        rows = [self.out[i * most : (i + 1) * most] for i in range(len(self.chains))]
        tokens = [row[: row.index(-1)] if row[-1] < 0 else row for row in rows]
        if self.traits is None:
            return tokens, []
        places = [range(i * most, i * most + len(row)) for i, row in enumerate(tokens)]
        return tokens, [[self.traits[at * TRAITS : at * TRAITS + TRAITS] for at in row] for row in places]


def hidden_of(net: Tensor) -> int:
    return (net.numel() - 1) // (TRAITS + 3)


def measure(logits: Tensor, temperature: float, token: int) -> Traits:
    """Of the law softmax(logits [V] / temperature), 1 where that is 0."""
    law = (logits.double() / (temperature or 1.0)).softmax(-1)
    best = law.topk(min(TOP, law.numel())).values.tolist()
    entropy = -float((law * law.clamp_min(1e-300).log()).sum())
    return [float(law[token]), entropy, *best, *[0.0] * (TOP - len(best))]


def halts(halt: Halt, traits: Traits, level: int) -> bool:
    return traits[0] < halt.least or traits[1] > halt.most or (halt.net is not None and score(halt.net, traits, level) < 0)


def score(net: Tensor, traits: Traits, level: int) -> float:
    """What the network says of a guess."""
    hidden = hidden_of(net)
    weights, rest = net[: hidden * (TRAITS + 1)].view(hidden, -1), net[hidden * (TRAITS + 1) :]
    inner = weights @ net.new_tensor([*traits, level]) + rest[:hidden]
    return float(inner.relu() @ rest[hidden:-1] + rest[-1])
