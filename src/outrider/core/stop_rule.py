"""Stop rules (early draft exit): reference implementation for all backends."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

TOP = 4
NUM_FEATURES = TOP + 2

# of a draft token: its probability, the entropy of its distribution, the TOP largest probabilities
NodeFeatures = list[float]
# the tokens of each chain; with a stop rule, their features
Chained = tuple[list[list[int]], list[list[NodeFeatures]]]


class StopRule(NamedTuple):
    """Thresholds for the early exit of a draft chain.

    least  end after a draft token of lower probability
    most   end after a draft token whose distribution has a higher entropy, in nats
    net    end after a draft token that this network scores below 0; None: no network.  float32, flat:
           weights [hidden, NUM_FEATURES + 1] for the features and the depth (from 0), biases [hidden], ReLU,
           weights [hidden], bias [1]
    """

    least: float = 0.0
    most: float = math.inf
    net: Tensor | None = None

    @property
    def judges(self) -> bool:
        """Whether it may end a chain."""
        return self.least > 0 or self.most < math.inf or self.net is not None


def hidden_of(net: Tensor) -> int:
    """Hidden units of a network in the layout of `StopRule.net`."""
    return (net.numel() - 1) // (NUM_FEATURES + 3)


def measure(logits: Tensor, temperature: float, token: int) -> NodeFeatures:
    """Features of `token` under softmax(logits [V] / temperature); temperature 0 counts as 1."""
    at, place = logits.new_tensor([temperature or 1.0]).double(), torch.tensor([token], device=logits.device)
    features: NodeFeatures = features_of(logits[None], at, place)[0].tolist()
    return features


def features_of(logits: Tensor, temperatures: Tensor, tokens: Tensor) -> Tensor:
    """Features float64 [n, NUM_FEATURES] of tokens [n] under softmax(logits [n, V] / temperatures [n])."""
    probs = (logits.double() / temperatures[:, None]).softmax(-1)
    entropy = -(probs * probs.clamp_min(1e-300).log()).sum(-1, keepdim=True)
    best = probs.topk(min(TOP, probs.shape[1])).values
    found = torch.cat([probs.gather(1, tokens[:, None]), entropy, best], 1)
    return torch.nn.functional.pad(found, (0, NUM_FEATURES - found.shape[1]))


def should_stop(stop_rule: StopRule, features: NodeFeatures, level: int) -> bool:
    """Whether a chain ends after a token with these features at depth `level`, from 0."""
    return (
        features[0] < stop_rule.least
        or features[1] > stop_rule.most
        or (stop_rule.net is not None and score(stop_rule.net, features, level) < 0)
    )


def score(net: Tensor, features: NodeFeatures, level: int) -> float:
    """Output of the network for one draft token."""
    hidden = hidden_of(net)
    weights, rest = net[: hidden * (NUM_FEATURES + 1)].view(hidden, -1), net[hidden * (NUM_FEATURES + 1) :]
    inner = weights @ net.new_tensor([*features, level]) + rest[:hidden]
    return float(inner.relu() @ rest[hidden:-1] + rest[-1])
