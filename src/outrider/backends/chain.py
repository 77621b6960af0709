"""A chain of guesses in one call, and when it ends before its last level: as the C kernels and torch decide it."""

from __future__ import annotations

import ctypes
import math
import struct
from array import array
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from torch import Tensor

if TYPE_CHECKING:
    from outrider.backends.base import Chain

TOP = 4
NUM_FEATURES = TOP + 2

NodeFeatures = list[
    float
]  # of a guess: its probability, the entropy of its law, the TOP largest probabilities there
Chained = tuple[
    list[list[int]], list[list[NodeFeatures]]
]  # the tokens of each chain, and their traits where something may halt it


class StopRule(NamedTuple):
    """No guess is made behind one that is less likely than `least`, whose law has more entropy than `most`, or that `net` doubts.

    net: float32, flat: [hidden, TRAITS + 1] weights (for the traits and the level, which counts from 0), [hidden] biases, then
    ReLU, [hidden] weights, [1] bias; below 0 it doubts.
    """

    least: float = 0.0
    most: float = math.inf
    net: Tensor | None = None


CHAIN = struct.Struct(
    "@lll dd Q ff"
)  # Chain of whole.c: at, levels, top_k; min_p, top_p; stream; temperature, floor


class Rule(ctypes.Structure):
    """`StopRule` of simd.h; it points into halt.net, which the caller keeps alive."""

    _fields_ = [
        *((name, ctypes.c_double) for name in ("least", "most")),
        ("net", ctypes.c_void_p),
        ("hidden", ctypes.c_long),
    ]

    @classmethod
    def of(cls, stop_rule: StopRule) -> Rule:
        net = stop_rule.net
        return cls(
            stop_rule.least,
            stop_rule.most,
            None if net is None else net.data_ptr(),
            0 if net is None else hidden_of(net),
        )


class Room:
    """What `chain` in whole.c reads of the chains, and where it puts what it finds."""

    def __init__(self, chains: Sequence[Chain], stop_rule: StopRule | None) -> None:
        self.most, self.chains = 0, b""
        for at, levels, (temperature, min_p, top_k, top_p), stream, floor in chains:
            if levels > self.most:
                self.most = levels
            self.chains += CHAIN.pack(at, levels, top_k, min_p, top_p, stream, temperature, floor)
        self.out = array("i", bytes(4 * self.most * len(chains)))
        self.rule = None if stop_rule is None else Rule.of(stop_rule)
        self.features = array("f", bytes(0 if stop_rule is None else 4 * NUM_FEATURES * len(self.out)))
        self.out_at, self.traits_at = self.out.buffer_info()[0], self.features.buffer_info()[0]
        self.rule_at = None if self.rule is None else ctypes.addressof(self.rule)

    def read(self) -> Chained:
        tokens: list[list[int]] = []
        features: list[list[NodeFeatures]] = []
        out = self.out.tolist()
        for first in range(0, len(out), self.most):
            said = out[first : first + self.most]
            tokens.append(said[: said.index(-1)] if said[-1] < 0 else said)
            if self.rule is not None:
                places = range(first * NUM_FEATURES, (first + len(tokens[-1])) * NUM_FEATURES, NUM_FEATURES)
                features.append([self.features[at : at + NUM_FEATURES].tolist() for at in places])
        return tokens, features


def hidden_of(net: Tensor) -> int:
    return (net.numel() - 1) // (NUM_FEATURES + 3)


def measure(logits: Tensor, temperature: float, token: int) -> NodeFeatures:
    """Of the law softmax(logits [V] / temperature), 1 where that is 0."""
    law = (logits.double() / (temperature or 1.0)).softmax(-1)
    best = law.topk(min(TOP, law.numel())).values.tolist()
    entropy = -float((law * law.clamp_min(1e-300).log()).sum())
    return [float(law[token]), entropy, *best, *[0.0] * (TOP - len(best))]


def should_stop(stop_rule: StopRule, features: NodeFeatures, level: int) -> bool:
    return (
        features[0] < stop_rule.least
        or features[1] > stop_rule.most
        or (stop_rule.net is not None and score(stop_rule.net, features, level) < 0)
    )


def score(net: Tensor, features: NodeFeatures, level: int) -> float:
    """What the network says of a guess."""
    hidden = hidden_of(net)
    weights, rest = net[: hidden * (NUM_FEATURES + 1)].view(hidden, -1), net[hidden * (NUM_FEATURES + 1) :]
    inner = weights @ net.new_tensor([*features, level]) + rest[:hidden]
    return float(inner.relu() @ rest[hidden:-1] + rest[-1])
