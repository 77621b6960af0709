"""The stop classifier of DISCO (Mamou et al. 2024, arXiv 2405.04304): a network that ends a draft early.

It has one hidden layer.  Its inputs are a node's probability, the entropy of q, the largest probabilities of
q, and the node's depth.  It is fitted to nodes that a target has accepted or rejected.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from outrider.core.stop_rule import NUM_FEATURES
from outrider.errors import ConfigError, first_line, write_fault

FEATURES = NUM_FEATURES + 1


class Classifier(nn.Module):
    """Network that predicts whether draft tokens are accepted: logits [n] from features [n, FEATURES]."""

    def __init__(self, width: int = 16) -> None:
        """width: of the hidden layer."""
        super().__init__()
        self.hidden, self.output = nn.Linear(FEATURES, width), nn.Linear(width, 1)

    def forward(self, features: Tensor) -> Tensor:
        logits: Tensor = self.output(self.hidden(features).relu())[:, 0]
        return logits

    def accepts(self, features: Sequence[float]) -> bool:
        """Whether a draft token with these features is more likely accepted than not."""
        return bool(self(torch.tensor([features])) >= 0)

    def flat(self, threshold: float) -> Tensor:
        """The weights as `StopRule.net`; its output is below 0 where P(accepted) < `threshold`."""
        share = min(max(threshold, 1e-6), 1 - 1e-6)
        *parts, bias = (parameter.detach().flatten() for parameter in self.parameters())
        return torch.cat([*parts, bias - math.log(share / (1 - share))]).float().contiguous()

    def save(self, file: str) -> None:
        """Write the weights as safetensors.  Raises ConfigError if the file cannot be written."""
        try:
            Path(file).parent.mkdir(parents=True, exist_ok=True)
            save_file(self.state_dict(), file, {"format": "pt"})
        except (OSError, SafetensorError) as error:
            raise ConfigError(
                f"the stop classifier {file!r} cannot be written: {write_fault(error)}"
            ) from error


def load(file: str) -> Classifier:
    """Read a file of `Classifier.save`.  Raises ConfigError."""
    try:
        tensors = load_file(Path(file).expanduser())
    except (OSError, SafetensorError) as error:
        raise ConfigError(
            f"stop_classifier {file!r} cannot be read: {error}.  `outrider tune disco` makes one."
        ) from error
    read = Classifier(max(1, tensors["hidden.bias"].numel() if "hidden.bias" in tensors else 1))
    try:
        read.load_state_dict(tensors)
    except RuntimeError as error:
        raise ConfigError(f"stop_classifier {file!r} is no such network: {first_line(error)}") from error
    return read


def fit(pairs: Sequence[tuple[Sequence[float], bool]], steps: int = 400, seed: int = 0) -> Classifier:
    """Fit to (features, whether accepted) by full-batch Adam.  Raises ConfigError unless both occur."""
    x = torch.tensor([features for features, _ in pairs])
    y = torch.tensor([float(accepted) for _, accepted in pairs])
    if not len(y) or not 0 < y.sum() < len(y):
        raise ConfigError(
            f"{len(y)} draft tokens, {int(y.sum())} of them right, teach nothing: right and wrong ones are "
            f"needed."
        )
    mean, scale = x.mean(0), x.std(0).clamp_min(1e-3)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        made = Classifier()
    optimizer = torch.optim.Adam(made.parameters(), lr=0.02, weight_decay=1e-4)
    normalized = (x - mean) / scale
    for _ in range(steps):
        optimizer.zero_grad()
        torch.autograd.backward(nn.functional.binary_cross_entropy_with_logits(made(normalized), y))
        optimizer.step()
    made.requires_grad_(False)
    made.hidden.weight.div_(scale)  # the first layer takes the features as they are
    made.hidden.bias.sub_(made.hidden.weight @ mean)
    return made
