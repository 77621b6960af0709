"""What the C kernels are given: the structs of kernels.h, as ctypes and packed by hand."""

from __future__ import annotations

import ctypes
from array import array
from typing import Any

from outrider.core.step_input import StepInput

LINEARS = ("qkv", "o", "gate_up", "down")
VECTORS = ("norm_in", "norm_post", "q_norm", "k_norm")


class Weight(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("data", "bias")),
        *((name, ctypes.c_int) for name in ("kind", "group", "offsets")),
        ("unit", ctypes.c_float),
    ]


class Layer(ctypes.Structure):
    _fields_ = [
        *((name, Weight) for name in LINEARS),
        *((name, ctypes.c_void_p) for name in VECTORS),
        *((name, ctypes.c_long) for name in ("window", "skip")),
    ]


class Shape(ctypes.Structure):
    _fields_ = [
        *(
            (name, ctypes.c_long)
            for name in ("layers", "hidden", "inner", "heads", "kv_heads", "head_dim", "width", "rot", "kv")
        ),
        *((name, ctypes.c_float) for name in ("eps", "scale")),
        ("turn", ctypes.c_void_p),
    ]


class Attention(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("keys", "values")),
        *(
            (name, ctypes.c_long)
            for name in (
                "head_bytes",
                "heads",
                "kv_heads",
                "head_dim",
                "padded_dim",
                "rotary_dim",
                "window",
            )
        ),
        *((name, ctypes.c_void_p) for name in ("q_norm", "k_norm", "rotary")),
        *((name, ctypes.c_float) for name in ("eps", "scale")),
        ("kind", ctypes.c_int),
    ]


class ScoreModifier(ctypes.Structure):
    _fields_ = [("slopes", ctypes.c_void_p), ("sinks", ctypes.c_void_p), ("cap", ctypes.c_float)]


class Ends(ctypes.Structure):
    _fields_ = [
        ("embedding", Weight),
        ("head", Weight),
        ("norm", ctypes.c_void_p),
        ("outputs", ctypes.c_long),
    ]


def rows(step_input: StepInput, adapted: ctypes.Array[Any] | None = None) -> array[int]:
    """`Rows` of kernels.h, twelve words, which point into the plan and to `lora.rows`."""
    runs, at = (0, 0) if adapted is None else (len(adapted), ctypes.addressof(adapted))
    where = (
        step_input.positions_at,
        step_input.slots_at,
        step_input.seen_at,
        step_input.depths_at,
        step_input.tables_at,
        step_input.paths_at,
    )
    return array(
        "q", (step_input.length, step_input.width, step_input.longest, step_input.pinned, *where, runs, at)
    )
