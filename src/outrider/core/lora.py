"""What a LoRA adapter adds to the linears of a decoder: the one form that adapters are read into, and the one of lora.c."""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor
from torch.nn.functional import pad

from outrider.checkpoints.spec import Spec

FUSED = {
    "qkv": ("q", "k", "v"),
    "o": ("o",),
    "gate_up": ("gate", "up"),
    "down": ("down",),
}  # what the decoder computes as one
PANEL = 64  # the same constant as in lora.c


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


def places(spec: Spec) -> dict[str, Place]:
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


class _Low(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("a", "b")),
        *((name, ctypes.c_long) for name in ("rank", "start", "outputs")),
        ("scale", ctypes.c_float),
    ]


class _Run(ctypes.Structure):
    _fields_ = [("row", ctypes.c_long), ("count", ctypes.c_long), ("parts", ctypes.POINTER(_Low))]


@dataclass
class Adapter:
    """For lora.c."""

    parts: ctypes.Array[_Low]  # of every layer: q, k, v, o, gate, up, down; rank 0 where nothing is added
    alive: object


def pack(spec: Spec, layers: Adapted) -> Adapter:
    made, alive = (_Low * (len(layers) * len(places(spec))))(), []
    for to, (layer, (name, place)) in zip(made, itertools.product(layers, places(spec).items())):
        if low := layer.get(name):
            a = pad(low.a.float(), (0, -place.inputs % 16)).contiguous()
            b = pad(low.b.float(), (0, 0, 0, -place.outputs % PANEL))
            b = b.view(-1, PANEL, len(a)).permute(0, 2, 1).contiguous()
            to.a, to.b, to.scale = a.data_ptr(), b.data_ptr(), low.scale
            to.rank, to.start, to.outputs = len(a), place.start, place.outputs
            alive.append((a, b))
    return Adapter(made, alive)


def rows(runs: Runs) -> ctypes.Array[_Run] | None:
    """The runs for lora.c, if there are any."""
    return (
        (_Run * len(runs))(*(_Run(first, count, adapter.parts) for first, count, adapter in runs))
        if runs
        else None
    )
