"""Views of a step and of options as structs of kernels.h."""

from __future__ import annotations

import ctypes
import struct
from array import array
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from outrider.backends.cpu.bindings import STRUCTS
from outrider.backends.layer import DecoderLayer
from outrider.cache.pool import Pool
from outrider.core.step_input import StepInput
from outrider.core.stop_rule import StopRule, hidden_of

LINEARS = ("qkv", "o", "gate_up", "down", "query_gate", "shared_gate")
ROWS = STRUCTS["Rows"]
SIZES = ("hidden", "inner", "heads", "kv_heads", "head_dim", "eps")
VECTORS = ("norm_in", "norm_post", "q_norm", "k_norm", "norm_attended", "norm_mlp", "sinks")


def keys_of(pool: Pool, layer: int = 0) -> int:
    """Address of a layer's K in a pool; its V is `plane_bytes` further on."""
    return pool.address + 2 * layer * pool.plane_bytes


def packer(name: str) -> struct.Struct:
    """What packs a struct of kernels.h as bytes, in a quarter of the time of a ctypes instance."""
    return struct.Struct("".join(kind._type_ for _, kind in STRUCTS[name]._fields_) + "0q")


def attach_experts(packed: Any, layers: Sequence[DecoderLayer]) -> list[Any]:
    """Let `Layer`s of kernels.h point at their experts.  Returns these, which the caller keeps alive."""
    alive = []
    for to, layer in zip(packed, layers):
        if (experts := layer.experts) is not None:
            of_layer = (STRUCTS["Expert"] * len(experts.gate_up))()
            for expert, gate_up, down in zip(of_layer, experts.gate_up, experts.down):
                expert.gate_up, expert.down = gate_up.c, down.c
            to.router, to.experts = experts.router.c, ctypes.addressof(of_layer)
            alive.append(of_layer)
    return alive


def attach_deltas(packed: Any, layers: Sequence[DecoderLayer]) -> list[Any]:
    """Let `Layer`s of kernels.h point at their delta rules.  Returns these, which the caller keeps alive."""
    alive = []
    for to, layer in zip(packed, layers):
        if (d := layer.delta) is not None:
            vectors = [vector.data_ptr() for vector in (d.taps, d.bias, d.rates, d.norm)]
            sizes = len(d.taps), d.key_heads, d.heads, d.key_dim, d.dim
            delta = STRUCTS["LayerDelta"](d.qkvz.c, d.gates.c, *vectors, *sizes)
            to.delta = ctypes.addressof(delta)
            alive.append(delta)
    return alive


def expert_sizes(layers: Sequence[DecoderLayer]) -> dict[str, float]:
    """The fields of `ModelShape` about experts, which all layers with experts agree in."""
    for layer in layers:
        if (experts := layer.experts) is not None:
            return {
                "shared_inner": 0 if layer.shared_gate is None else layer.down.inputs,
                "experts": len(experts.down),
                "chosen_experts": experts.chosen,
                "expert_inner": experts.down[0].inputs,
                "normalizes_experts": int(experts.normalized),
                "gate_slope": experts.gate_slope,
                "gate_limit": experts.gate_limit,
            }
    return {}


def stop_rule(rule: StopRule | None) -> Any:
    """`StopRule` of kernels.h.  It points into the network, which the caller keeps alive."""
    if rule is None:
        return None
    hidden = 0 if rule.net is None else hidden_of(rule.net)
    return STRUCTS["StopRule"](rule.least, rule.most, address(rule.net), hidden)


class StepView:
    """Addresses of a built step's arrays.  The step owns it, as it points into its arrays and slot tables."""

    def __init__(self, step_input: StepInput) -> None:
        step, first = step_input, 0
        tables: list[int] = []
        for table, end in zip(step.slot_tables, step.query_start[1:]):
            tables += [table.buffer_info()[0]] * (end - first)
            first = end
        self.tables = array("q", tables)  # the address of every row's slot table
        self.input_ids = at = step.columns.buffer_info()[0]
        n, size = step.length, 8 * step.length
        columns = at + size, at + 2 * size, at + 3 * size, at + 4 * size
        slots = self.tables.buffer_info()[0], step.path_slots.buffer_info()[0]
        sizes = n, step.max_path_len, step.max_seq_len, step.pinned
        # words of 64 bits, without LoRA runs and recurrent rows: the constructor takes 20 µs right behind a
        # forward
        self.rows = ROWS.from_buffer(array("q", (*sizes, *columns, *slots, 0, 0, 0)))

    def with_adapters(self, runs: ctypes.Array[Any] | None) -> Any:
        """The rows, with these runs of LoRA adapters (see lora.py).  The caller keeps the runs alive."""
        if runs is not None or self.rows.num_lora_runs:
            self.rows.num_lora_runs = 0 if runs is None else len(runs)
            self.rows.lora_runs = None if runs is None else ctypes.addressof(runs)
        return self.rows


def view(step_input: StepInput) -> StepView:
    """The C view of a built step, made once."""
    return step_input.derived(StepView, StepView)


def address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()
