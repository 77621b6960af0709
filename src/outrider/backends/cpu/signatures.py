"""Signatures of the C functions, argument by argument."""

from __future__ import annotations

import ctypes
from ctypes import POINTER, c_char_p, c_double, c_float, c_int, c_int32, c_long, c_uint64, c_void_p
from typing import Any

from outrider.backends.cpu import structs

WEIGHT, SHAPE, ROWS = POINTER(structs.Weight), POINTER(structs.Shape), POINTER(structs.Rows)
ATTENTION = POINTER(structs.Attention)
LAYERS, ENDS, POOL = POINTER(structs.Layer), POINTER(structs.Ends), c_void_p
SAMPLING = {"temperature": c_float, "min_p": c_double, "top_k": c_long, "top_p": c_double}

# function: (result, {argument: type})
SIGNATURES: dict[str, tuple[Any, dict[str, Any]]] = {
    "linear": (
        None,
        {"weight": WEIGHT, "x": c_void_p, "rows": c_long, "inputs": c_long}
        | {"y": c_void_p, "outputs": c_long, "add": c_int},
    ),
    "embed": (
        None,
        {"weight": WEIGHT, "input_ids": c_void_p, "rows": c_long, "hidden": c_long, "y": c_void_p},
    ),
    "pair": (
        None,
        {"embedding": WEIGHT, "input_ids": c_void_p, "rows": c_long, "inputs": c_long}
        | {"states": c_void_p, "hidden": c_long, "norm_token": c_void_p, "norm_state": c_void_p}
        | {"eps": c_float, "y": c_void_p},
    ),
    "rms_norm": (
        None,
        {"x": c_void_p, "weight": c_void_p, "rows": c_long, "hidden": c_long, "eps": c_float, "y": c_void_p},
    ),
    "silu_mul": (None, {"x": c_void_p, "rows": c_long, "inner": c_long, "y": c_void_p}),
    "rope_store": (None, {"attention": ATTENTION, "rows": ROWS, "qkv": c_void_p, "q": c_void_p}),
    "attend": (
        None,
        {"attention": ATTENTION, "rows": ROWS, "q": c_void_p}
        | {"modifier": POINTER(structs.ScoreModifier), "out": c_void_p},
    ),
    "stack": (
        None,
        {"shape": SHAPE, "layers": LAYERS, "rows": ROWS, "pool": POOL, "plane_bytes": c_long}
        | {"x": c_void_p, "u": c_void_p, "u_width": c_long, "taps": c_void_p},
    ),
    "read_model": (
        None,
        {"shape": SHAPE, "layers": LAYERS, "ends": ENDS, "rows": ROWS, "input_ids": c_void_p}
        | {"pool": POOL, "plane_bytes": c_long, "taps": c_void_p, "logits_rows": c_void_p}
        | {"num_logits_rows": c_long, "logits": c_void_p}
        | {"queries": c_char_p, "num_queries": c_long, "trees": c_void_p},
    ),
    "chain": (
        None,
        {"shape": SHAPE, "layers": LAYERS, "ends": ENDS, "rows": ROWS, "input_ids": c_void_p}
        | {"pool": POOL, "plane_bytes": c_long, "chains": POINTER(structs.Chain), "num_chains": c_long}
        | {"levels": c_long, "vocabulary": c_long, "stop_rule": POINTER(structs.StopRule)}
        | {"tokens": c_void_p, "features": c_void_p, "states": c_void_p},
    ),
    "pick": (
        c_long,
        {"logits": c_void_p, "vocabulary": c_long, **SAMPLING, "key": c_uint64, "k": c_long}
        | {"tokens": c_void_p, "probs": c_void_p},
    ),
    "picks": (
        None,
        {"logits": c_void_p, "rows": c_long, "vocabulary": c_long, **SAMPLING, "keys": c_void_p}
        | {"ids": c_void_p, "k": c_long, "tokens": c_void_p, "probs": c_void_p},
    ),
    "follow": (
        None,
        {"logits": c_void_p, "stride": c_long, "vocabulary": c_long, "block_max": c_void_p}
        | {"num_blocks": c_long, "queries": c_char_p, "num_queries": c_long, "trees": c_void_p},
    ),
    "should_stop": (
        c_int,
        {"stop_rule": POINTER(structs.StopRule), "logits": c_void_p, "vocabulary": c_long}
        | {"temperature": c_float, "token": c_int32, "depth": c_long, "features": c_void_p},
    ),
}


def declare(library: ctypes.CDLL) -> ctypes.CDLL:
    """Set the argument and result types of all functions of `SIGNATURES`."""
    for name, (result, arguments) in SIGNATURES.items():
        function = getattr(library, name)
        function.argtypes, function.restype = [*arguments.values()], result
    return library
