"""The structs of kernels.h."""

from __future__ import annotations

import ctypes
from array import array
from ctypes import c_double, c_float, c_int, c_long, c_uint64, c_void_p
from typing import Any

from torch import Tensor

from outrider.core.step_input import StepInput
from outrider.core.stop_rule import StopRule as StopRuleOptions
from outrider.core.stop_rule import hidden_of

LINEARS = ("qkv", "o", "gate_up", "down")
VECTORS = ("norm_in", "norm_post", "q_norm", "k_norm")


class Weight(ctypes.Structure):
    _fields_ = [
        ("data", c_void_p),
        ("bias", c_void_p),
        ("kind", c_int),
        ("group", c_int),
        ("offsets", c_int),
        ("unit", c_float),
    ]


class Layer(ctypes.Structure):
    _fields_ = [
        *((name, Weight) for name in LINEARS),
        *((name, c_void_p) for name in VECTORS),
        ("window", c_long),
        ("skip", c_long),
    ]


class Shape(ctypes.Structure):
    _fields_ = [
        ("layers", c_long),
        ("hidden", c_long),
        ("inner", c_long),
        ("heads", c_long),
        ("kv_heads", c_long),
        ("head_dim", c_long),
        ("width", c_long),
        ("rot", c_long),
        ("kv", c_long),
        ("eps", c_float),
        ("scale", c_float),
        ("turn", c_void_p),
    ]


class Attention(ctypes.Structure):
    _fields_ = [
        ("keys", c_void_p),
        ("values", c_void_p),
        ("head_bytes", c_long),
        ("heads", c_long),
        ("kv_heads", c_long),
        ("head_dim", c_long),
        ("padded_dim", c_long),
        ("rotary_dim", c_long),
        ("window", c_long),
        ("q_norm", c_void_p),
        ("k_norm", c_void_p),
        ("rotary", c_void_p),
        ("eps", c_float),
        ("scale", c_float),
        ("kind", c_int),
    ]


class ScoreModifier(ctypes.Structure):
    _fields_ = [("slopes", c_void_p), ("sinks", c_void_p), ("cap", c_float)]


class Ends(ctypes.Structure):
    _fields_ = [("embedding", Weight), ("head", Weight), ("norm", c_void_p), ("outputs", c_long)]


class Rows(ctypes.Structure):
    _fields_ = [
        ("n", c_long),
        ("path", c_long),
        ("longest", c_long),
        ("pinned", c_long),
        ("positions", c_void_p),
        ("slots", c_void_p),
        ("seen", c_void_p),
        ("depths", c_void_p),
        ("tables", c_void_p),
        ("paths", c_void_p),
        ("runs", c_long),
        ("adapted", c_void_p),
    ]


class StopRule(ctypes.Structure):
    """`StopRule` of kernels.h.  It points into the network, which the caller keeps alive."""

    _fields_ = [("least", c_double), ("most", c_double), ("net", c_void_p), ("hidden", c_long)]

    @classmethod
    def of(cls, rule: StopRuleOptions) -> StopRule:
        hidden = 0 if rule.net is None else hidden_of(rule.net)
        return cls(rule.least, rule.most, address(rule.net), hidden)


class Chain(ctypes.Structure):
    _fields_ = [
        ("at", c_long),
        ("levels", c_long),
        ("top_k", c_long),
        ("min_p", c_double),
        ("top_p", c_double),
        ("stream", c_uint64),
        ("temperature", c_float),
        ("floor", c_float),
    ]


class StepView:
    """Addresses of a built step's arrays.  The step owns it, as it points into its arrays and slot tables."""

    def __init__(self, step_input: StepInput) -> None:
        bounds = zip(step_input.slot_tables, step_input.query_start, step_input.query_start[1:])
        tables = [table.buffer_info()[0] for table, first, end in bounds for _ in range(first, end)]
        self.tables = array("q", tables)  # the address of every row's slot table
        self.input_ids = step_input.input_ids.buffer_info()[0]
        columns = (
            step_input.positions,
            step_input.slot_mapping,
            step_input.context_lens,
            step_input.path_lens,
            self.tables,
            step_input.path_slots,
        )
        self.rows = Rows(
            step_input.length,
            step_input.max_path_len,
            step_input.max_seq_len,
            step_input.pinned,
            *(column.buffer_info()[0] for column in columns),
            0,
            None,
        )

    def with_adapters(self, runs: ctypes.Array[Any] | None) -> Rows:
        """The rows, with these runs of LoRA adapters (see lora.py).  The caller keeps the runs alive."""
        self.rows.runs = 0 if runs is None else len(runs)
        self.rows.adapted = None if runs is None else ctypes.addressof(runs)
        return self.rows


def view(step_input: StepInput) -> StepView:
    """The C view of a built step, made once."""
    return step_input.derived(StepView, StepView)


def address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()
