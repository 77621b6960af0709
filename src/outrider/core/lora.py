"""LoRA updates of a decoder's linears, between the reader of adapter files and the backends."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from torch import Tensor

# fused linear of the decoder -> its projections
FUSED = {"qkv": ("q", "k", "v"), "o": ("o",), "gate_up": ("gate", "up"), "down": ("down",)}


class LayerSizes(Protocol):
    """Sizes of a decoder layer, which give the shapes of its projections."""

    @property
    def hidden(self) -> int: ...
    @property
    def inner(self) -> int: ...
    @property
    def heads(self) -> int: ...
    @property
    def kv_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...


class LowRankUpdate(NamedTuple):
    """Update of one projection: y += scale * b (a x), with a [rank, inputs] and b [outputs, rank]."""

    a: Tensor
    b: Tensor
    scale: float


class Place(NamedTuple):
    """Inputs of a projection, and its range of outputs within the fused linear."""

    inputs: int
    start: int
    outputs: int


def places(spec: LayerSizes) -> dict[str, Place]:
    """The place of every projection that can be adapted, in the order of FUSED."""
    q, kv = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
    return {
        "q": Place(spec.hidden, 0, q),
        "k": Place(spec.hidden, q, kv),
        "v": Place(spec.hidden, q + kv, kv),
        "o": Place(q, 0, spec.hidden),
        "gate": Place(spec.hidden, 0, spec.inner),
        "up": Place(spec.hidden, spec.inner, spec.inner),
        "down": Place(spec.inner, 0, spec.hidden),
    }


Adapted = Sequence[Mapping[str, LowRankUpdate]]  # of every layer: projection -> its update
# (first row, number of rows, packed adapter), ascending; rows without an adapter are left out
Runs = Sequence[tuple[int, int, Any]]
