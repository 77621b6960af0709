"""A chain of draft tokens in one C call: what fused.c reads and writes."""

from __future__ import annotations

import ctypes
import struct
from array import array
from collections.abc import Sequence

from outrider.backends.base import Chain
from outrider.core.stop_rule import NUM_FEATURES, Chained, NodeFeatures, StopRule, hidden_of

CHAIN = struct.Struct(
    "@lll dd Q ff"
)  # Chain of fused.c: at, levels, top_k; min_p, top_p; stream; temperature, floor


class Rule(ctypes.Structure):
    """`StopRule` of kernels.h; it points into halt.net, which the caller keeps alive."""

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
    """What `chain` in fused.c reads of the chains, and where it puts what it finds."""

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
