"""A small network that says when to stop guessing (DISCO, Mamou et al. 2024, arXiv 2405.04304).

It sees a guess's probability, the entropy of the law it came from, the largest probabilities there and its level, has one hidden
layer and was fitted to guesses of which the target had said whether they are right.
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


@dataclass(frozen=True)
class Classifier:
    """float32: hidden [H, FEATURES] and [H], output [1, H] and [1]: the logit of the guess being right."""

    hidden: Tensor
    hidden_bias: Tensor
    output: Tensor
    output_bias: Tensor

    def __call__(self, features: Tensor) -> Tensor:
        """[n, FEATURES] -> logits [n]."""
        return ((features @ self.hidden.T + self.hidden_bias).relu() @ self.output.T + self.output_bias)[:, 0]

    def right(self, features: Sequence[float]) -> bool:
        return bool(self(torch.tensor([features])) >= 0)

    def flat(self, threshold: float) -> Tensor:
        """As `StopRule.net`: below 0 where the guess is right with less than `threshold`."""
        share = min(max(threshold, 1e-6), 1 - 1e-6)
        bias = self.output_bias - math.log(share / (1 - share))
        return (
            torch.cat([self.hidden.flatten(), self.hidden_bias, self.output.flatten(), bias])
            .float()
            .contiguous()
        )

    def save(self, file: str) -> None:
        tensors = (self.hidden, self.hidden_bias, self.output, self.output_bias)
        try:
            Path(file).parent.mkdir(parents=True, exist_ok=True)
            save_file(
                {name: tensor.contiguous() for name, tensor in zip(NAMES, tensors)}, file, {"format": "pt"}
            )
        except OSError as error:
            raise ConfigError(f"the stop classifier {file!r} cannot be written: {error}.") from error


def load(file: str) -> Classifier:
    try:
        tensors = load_file(Path(file).expanduser())
    except (OSError, SafetensorError) as error:
        raise ConfigError(
            f"stop_classifier {file!r} cannot be read: {error}.  `outrider tune disco` makes one."
        ) from error
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    width = shapes.get(NAMES[0], (0,))[0]
    if shapes != dict(zip(NAMES, ((width, FEATURES), (width,), (1, width), (1,)))) or not width:
        raise ConfigError(
            f"stop_classifier {file!r} is no such network: it needs {', '.join(NAMES)} with {FEATURES} inputs, has {shapes}."
        )
    return Classifier(*(tensors[name].float() for name in NAMES))


def fit(
    pairs: Sequence[tuple[Sequence[float], bool]], hidden: int = 16, steps: int = 400, seed: int = 0
) -> Classifier:
    """A network fitted to (features, whether the guess was right), both kinds among them, by full-batch Adam on the cross entropy."""
    x, y = (
        torch.tensor([features for features, _ in pairs]),
        torch.tensor([float(right) for _, right in pairs]),
    )
    if not len(y) or not 0 < y.sum() < len(y):
        raise ConfigError(
            f"{len(y)} guesses, {int(y.sum())} of them right, teach nothing: right and wrong ones are needed."
        )
    mean, scale = x.mean(0), x.std(0).clamp_min(1e-3)
    generator = torch.Generator().manual_seed(seed)
    shapes = ((hidden, FEATURES), (hidden,), (1, hidden), (1,))
    parts = [
        torch.randn(shape, generator=generator) * (shape[-1] ** -0.5 if len(shape) == 2 else 0.0)
        for shape in shapes
    ]
    weights = [part.requires_grad_() for part in parts]
    optimiser = torch.optim.Adam(weights, lr=0.02, weight_decay=1e-4)
    standard = (x - mean) / scale
    for _ in range(steps):
        optimiser.zero_grad()
        loss = torch.nn.functional.binary_cross_entropy_with_logits(Classifier(*weights)(standard), y)
        torch.autograd.backward(loss)
        optimiser.step()
    first, bias, output, last = (weight.detach() for weight in weights)
    first = first / scale  # so that it takes features as they are
    return Classifier(first, bias - first @ mean, output, last)
