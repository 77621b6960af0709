"""Stop rules: when a chain of draft tokens ends before its last level, as every backend decides it."""

from __future__ import annotations

import math
from typing import NamedTuple

from torch import Tensor

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


def hidden_of(net: Tensor) -> int:
    return (net.numel() - 1) // (NUM_FEATURES + 3)


def measure(logits: Tensor, temperature: float, token: int) -> NodeFeatures:
    """Of the law softmax(logits [V] / temperature), 1 where that is 0."""
    distribution = (logits.double() / (temperature or 1.0)).softmax(-1)
    best = distribution.topk(min(TOP, distribution.numel())).values.tolist()
    entropy = -float((distribution * distribution.clamp_min(1e-300).log()).sum())
    return [float(distribution[token]), entropy, *best, *[0.0] * (TOP - len(best))]


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
