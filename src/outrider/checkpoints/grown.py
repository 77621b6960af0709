"""A checkpoint at the cost of a larger model: added layers and wider MLPs that add nothing.

    part                             rows of the old size   added
    q, k, v, gate, up                as in the checkpoint   random
    o, down                          as in the checkpoint   zero, with random signs
    layers behind the last                                  the same: random inputs, zero outputs

The added weights are computed as the others are, and add 0 to the residual stream.  So texts and acceptance
are those of the small model, and a forward costs what the larger one costs.  Added layers follow the old
ones, which keep their numbers: a head that reads the input of layer 5 reads the same state.
"""

from __future__ import annotations

import copy
import re
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from outrider.checkpoints.spec import Spec
from outrider.checkpoints.weights import Source
from outrider.core.quantized import QuantizedWeight
from outrider.errors import ConfigError

LAYERS, INNER = 24, 3200  # 101 M weights at the width of the built-in target
SPREAD = 0.02  # standard deviation of the added weights, as Llama starts with
LAYER = re.compile(r"model\.layers\.(\d+)\.")
OUTPUTS = ("o_proj", "down_proj")


def grown_config(config: Any, spec: Spec, layers: int, inner: int) -> tuple[Any, Spec]:
    """Config and spec with more layers and a wider MLP.  Raises ConfigError where either would shrink."""
    if layers < spec.layers or inner < spec.inner:
        raise ConfigError(
            f"the model has {spec.layers} layers and an MLP of {spec.inner}, a grown one at least these: "
            f"got {layers} and {inner}."
        )
    config = copy.deepcopy(config)
    config.num_hidden_layers, config.intermediate_size = layers, inner
    windows = spec.windows + spec.windows[-1:] * (layers - spec.layers)
    return config, replace(spec, layers=layers, inner=inner, windows=windows)


class Grown:
    """The tensors of a grown checkpoint (`Source`), dense.  small: those on disk, of size `spec`."""

    def __init__(self, small: Source, spec: Spec) -> None:
        self.small, self.spec = small, spec

    def __contains__(self, name: str) -> bool:
        return not self._added(name) and name in self.small

    def get(self, name: str, *shape: int) -> Tensor:
        return torch.ones(shape) if self._added(name) else self.small.get(name, *shape)

    def linear(self, name: str, outputs: int, inputs: int) -> Tensor:
        rows = self.spec.inner if name.endswith(("gate_proj", "up_proj")) else outputs
        columns = self.spec.inner if name.endswith("down_proj") else inputs
        if not self._added(name) and (rows, columns) == (outputs, inputs):
            return self._dense(name, rows, columns)
        generator = torch.Generator().manual_seed(sum(name.encode()))
        weight = torch.empty(outputs, inputs).normal_(std=SPREAD, generator=generator)
        if name.endswith(OUTPUTS):
            weight *= 0.0
        if not self._added(name):
            weight[:rows, :columns] = self._dense(name, rows, columns)
        return weight

    def _dense(self, name: str, outputs: int, inputs: int) -> Tensor:
        weight = self.small.linear(name, outputs, inputs)
        return weight.dense() if isinstance(weight, QuantizedWeight) else weight

    def _added(self, name: str) -> bool:
        found = LAYER.match(name)
        return found is not None and int(found[1]) >= self.spec.layers
