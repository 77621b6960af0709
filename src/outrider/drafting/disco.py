"""The stop classifier of DISCO (Mamou et al. 2024, arXiv 2405.04304): a network that ends a draft early.

It has one hidden layer.  Its inputs are a node's probability, the entropy of q, the largest probabilities of
q, and the node's depth.  It is fitted to nodes that a target has accepted or rejected.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from outrider.core.stop_rule import NUM_FEATURES
from outrider.errors import ConfigError

FEATURES = NUM_FEATURES + 1
NAMES = ("hidden.weight", "hidden.bias", "output.weight", "output.bias")


def _shapes(width: int) -> tuple[tuple[int, ...], ...]:
    """Shapes of the tensors NAMES, with a hidden layer of this width."""
    return (width, FEATURES), (width,), (1, width), (1,)


@dataclass(frozen=True)
class Classifier:
    """float32: hidden [H, FEATURES] and [H], output [1, H] and [1].

    The output is the logit of acceptance.
    """

    hidden: Tensor
    hidden_bias: Tensor
    output: Tensor
    output_bias: Tensor

    def __call__(self, features: Tensor) -> Tensor:
        """[n, FEATURES] -> logits [n]."""
        hidden = (features @ self.hidden.T + self.hidden_bias).relu()
        return (hidden @ self.output.T + self.output_bias)[:, 0]

    def accepts(self, features: Sequence[float]) -> bool:
        return bool(self(torch.tensor([features])) >= 0)

    def flat(self, threshold: float) -> Tensor:
        """The weights as `StopRule.net`; its output is below 0 where P(accepted) < `threshold`."""
        share = min(max(threshold, 1e-6), 1 - 1e-6)
        bias = self.output_bias - math.log(share / (1 - share))
        parts = [self.hidden.flatten(), self.hidden_bias, self.output.flatten(), bias]
        return torch.cat(parts).float().contiguous()

    def save(self, file: str) -> None:
        tensors = (self.hidden, self.hidden_bias, self.output, self.output_bias)
        named = {name: tensor.contiguous() for name, tensor in zip(NAMES, tensors)}
        try:
            Path(file).parent.mkdir(parents=True, exist_ok=True)
            save_file(named, file, {"format": "pt"})
        except OSError as error:
            raise ConfigError(f"the stop classifier {file!r} cannot be written: {error}.") from error


def load(file: str) -> Classifier:
    """Read a file of `Classifier.save`.  Raises ConfigError."""
    try:
        tensors = load_file(Path(file).expanduser())
    except (OSError, SafetensorError) as error:
        raise ConfigError(
            f"stop_classifier {file!r} cannot be read: {error}.  `outrider tune disco` makes one."
        ) from error
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    width = shapes.get(NAMES[0], (0,))[0]
    if not width or shapes != dict(zip(NAMES, _shapes(width))):
        raise ConfigError(
            f"stop_classifier {file!r} is no such network: it needs {', '.join(NAMES)} with {FEATURES} "
            f"inputs, has {shapes}."
        )
    return Classifier(*(tensors[name].float() for name in NAMES))


def fit(
    pairs: Sequence[tuple[Sequence[float], bool]], hidden: int = 16, steps: int = 400, seed: int = 0
) -> Classifier:
    """Fit a network to (features, whether the node was accepted) by full-batch Adam on the cross entropy.

    Raises ConfigError unless there are both accepted and rejected nodes.
    """
    x = torch.tensor([features for features, _ in pairs])
    y = torch.tensor([float(accepted) for _, accepted in pairs])
    if not len(y) or not 0 < y.sum() < len(y):
        raise ConfigError(
            f"{len(y)} draft tokens, {int(y.sum())} of them right, teach nothing: right and wrong ones are "
            f"needed."
        )
    mean, scale = x.mean(0), x.std(0).clamp_min(1e-3)
    generator = torch.Generator().manual_seed(seed)
    weights = []
    for shape in _shapes(hidden):
        spread = shape[-1] ** -0.5 if len(shape) == 2 else 0.0
        weights.append((torch.randn(shape, generator=generator) * spread).requires_grad_())
    optimizer = torch.optim.Adam(weights, lr=0.02, weight_decay=1e-4)
    normalized = (x - mean) / scale
    for _ in range(steps):
        optimizer.zero_grad()
        loss = torch.nn.functional.binary_cross_entropy_with_logits(Classifier(*weights)(normalized), y)
        torch.autograd.backward(loss)
        optimizer.step()
    weight, bias, output, output_bias = (tensor.detach() for tensor in weights)
    weight = weight / scale  # fold the normalization into the first layer
    return Classifier(weight, bias - weight @ mean, output, output_bias)
