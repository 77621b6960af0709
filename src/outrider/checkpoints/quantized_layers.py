"""Files with quantized layers: what their formats share."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from torch import Tensor

from outrider.checkpoints.packed_scheme import Scheme
from outrider.checkpoints.weights import Weights
from outrider.core.quantized import QuantizedWeight


@dataclass(frozen=True)
class Layout:
    """Names of the tensors of a quantized layer.

    group_index: the group of each input, "" if the format has none.  others: tensors that are not read.
    """

    values: str
    zeros: str
    scales: str
    group_index: str = ""
    others: tuple[str, ...] = ()

    @property
    def parts(self) -> tuple[str, ...]:
        """All of them but "weight", which is also the name of the whole."""
        names = (self.values, self.zeros, self.scales, self.group_index, *self.others)
        return tuple(name for name in names if name not in ("weight", ""))


class QuantizedLayers:
    """The tensors of a quantized checkpoint or head (`Source`).  A quantized layer is one tensor, its weight.

    layer_of: name of such a weight -> name of its layer.
    """

    def __init__(self, files: Weights, scheme: Scheme, layout: Layout, layers: Iterable[str]) -> None:
        self.files, self.scheme, self.layout, self.parts = files, scheme, layout, layout.parts
        self.layer_of = {f"{layer}.weight": layer for layer in layers}

    def __contains__(self, name: str) -> bool:
        return name in self.layer_of or (name in self.files and not self._is_part(name))

    def __iter__(self) -> Iterator[str]:
        yield from (name for name in self.layer_of if name not in self.files)
        yield from (name for name in self.files if not self._is_part(name))

    def _is_part(self, name: str) -> bool:
        """Whether a tensor of the files is a part of a quantized layer."""
        layer, _, part = name.rpartition(".")
        return part in self.parts and f"{layer}.{self.layout.values}" in self.files

    def shape(self, name: str) -> tuple[int, ...]:
        return self.files.shape(name)

    def raw(self, name: str) -> Tensor:
        """The tensor; of a quantized layer its dense weight."""
        weight = self.weight(name)
        return weight.dense() if isinstance(weight, QuantizedWeight) else weight

    def weight(self, name: str) -> Tensor | QuantizedWeight:
        layer = self.layer_of.get(name)
        return self.files.raw(name) if layer is None else self._read(layer)

    def _read(self, layer: str) -> Tensor | QuantizedWeight:
        """The weight of a quantized layer."""
        raise NotImplementedError

    def get(self, name: str, *shape: int) -> Tensor:
        return self.files.get(name, *shape)

    def linear(self, name: str, outputs: int, inputs: int) -> Tensor | QuantizedWeight:
        """The weight [outputs, inputs] of a layer, quantized or not."""
        raise NotImplementedError

    def bits(self, names: Iterable[str]) -> int | None:
        """The most bits that a value of these weights has in memory; None if none of them is quantized."""
        raise NotImplementedError
