"""LoRA adapters in the layout of lora.c."""

from __future__ import annotations

import ctypes
import itertools
from dataclasses import dataclass
from typing import Any

from torch.nn.functional import pad

from outrider.backends.cpu.bindings import STRUCTS
from outrider.core.lora import Adapted, LayerSizes, Runs, places

PANEL = 64  # outputs side by side; the same constant as in lora.c


@dataclass
class Adapter:
    """An adapter as lora.c reads it."""

    parts: ctypes.Array[Any]  # LoraPart, per layer: q, k, v, o, gate, up, down; rank 0 where nothing is added
    alive: object


def pack(spec: LayerSizes, layers: Adapted) -> Adapter:
    made, alive = (STRUCTS["LoraPart"] * (len(layers) * len(places(spec))))(), []
    for to, (layer, (name, place)) in zip(made, itertools.product(layers, places(spec).items())):
        if low := layer.get(name):
            a = pad(low.a.float(), (0, -place.inputs % 16)).contiguous()
            b = pad(low.b.float(), (0, 0, 0, -place.outputs % PANEL))
            b = b.view(-1, PANEL, len(a)).permute(0, 2, 1).contiguous()
            to.a, to.b, to.scale = a.data_ptr(), b.data_ptr(), low.scale
            to.rank, to.start, to.outputs = len(a), place.start, place.outputs
            alive.append((a, b))
    return Adapter(made, alive)


def rows(runs: Runs) -> ctypes.Array[Any] | None:
    """The runs as lora.c reads them; None if there are none."""
    if not runs:
        return None
    made: ctypes.Array[Any] = (STRUCTS["LoraRun"] * len(runs))()
    for run, (first, count, adapter) in zip(made, runs):
        run.first_row, run.num_rows, run.parts = first, count, ctypes.addressof(adapter.parts)
    return made
