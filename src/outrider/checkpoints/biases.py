"""Biases that a model has by its config.

A layer is read with the biases that its files have (models/layers.py).  Where some are lost, the model would
load, and give other texts.
"""

from __future__ import annotations

from collections.abc import Iterator

from outrider.checkpoints.spec import Spec
from outrider.checkpoints.weights import Source


def require_biases(source: Source, spec: Spec) -> None:
    """Raise ModelError, with the name in the files, for a bias of attention or experts that is missing."""
    for name in _names(spec):
        if name not in source:
            source.get(name, 0)  # raises


def _names(spec: Spec) -> Iterator[str]:
    """Of experts those of the first: the files have all experts of a layer in one tensor."""
    for i in range(spec.layers):
        prefix = f"model.layers.{i}"
        if spec.variant.attention_biases:
            yield from (f"{prefix}.self_attn.{part}_proj.bias" for part in "qkvo")
        if spec.variant.expert_biases:
            yield f"{prefix}.mlp.gate.bias"
            yield from (f"{prefix}.mlp.experts.0.{part}_proj.bias" for part in ("gate", "up", "down"))
