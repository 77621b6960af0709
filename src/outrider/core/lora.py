"""LoRA updates of a decoder's linears: the form that adapter files are read into and every backend packs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from torch import Tensor

FUSED = {
    "qkv": ("q", "k", "v"),
    "o": ("o",),
    "gate_up": ("gate", "up"),
    "down": ("down",),
}  # what the decoder computes as one


class LayerSizes(Protocol):
    """Sizes of a decoder layer: what the shapes of its projections follow from."""

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


@dataclass(frozen=True)
class Low:
    """y[rows, place] += scale * b (a x): a [rank, inputs], b [outputs, rank]."""

    a: Tensor
    b: Tensor
    scale: float


class Place(NamedTuple):
    """Where the outputs of a projection stand in its fused linear."""

    inputs: int
    start: int
    outputs: int


def places(spec: LayerSizes) -> dict[str, Place]:
    """Of every projection that can be adapted, in the order of FUSED."""
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


Adapted = Sequence[Mapping[str, Low]]  # of every layer: projection -> what is added to it
Runs = Sequence[
    tuple[int, int, Any]
]  # first row, rows, adapter as the kernels packed it; ascending, rows without one left out
