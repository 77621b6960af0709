"""Views of a step and of options as structs of kernels.h."""

from __future__ import annotations

import ctypes
from array import array
from typing import Any

from torch import Tensor

from outrider.backends.cpu.bindings import STRUCTS
from outrider.core.step_input import StepInput
from outrider.core.stop_rule import StopRule, hidden_of

LINEARS = ("qkv", "o", "gate_up", "down")
ROWS = STRUCTS["Rows"]
VECTORS = ("norm_in", "norm_post", "q_norm", "k_norm")


def stop_rule(rule: StopRule | None) -> Any:
    """`StopRule` of kernels.h.  It points into the network, which the caller keeps alive."""
    if rule is None:
        return None
    hidden = 0 if rule.net is None else hidden_of(rule.net)
    return STRUCTS["StopRule"](rule.least, rule.most, address(rule.net), hidden)


class StepView:
    """Addresses of a built step's arrays.  The step owns it, as it points into its arrays and slot tables."""

    def __init__(self, step_input: StepInput) -> None:
        step, starts = step_input, step_input.query_start
        self.tables = array("q")  # the address of every row's slot table
        for table, first, end in zip(step.slot_tables, starts, starts[1:]):
            self.tables.extend([table.buffer_info()[0]] * (end - first))
        self.input_ids = step.input_ids.buffer_info()[0]
        self.rows = ROWS(
            step.length,
            step.max_path_len,
            step.max_seq_len,
            step.pinned,
            step.positions.buffer_info()[0],
            step.slot_mapping.buffer_info()[0],
            step.context_lens.buffer_info()[0],
            step.path_lens.buffer_info()[0],
            self.tables.buffer_info()[0],
            step.path_slots.buffer_info()[0],
        )

    def with_adapters(self, runs: ctypes.Array[Any] | None) -> Any:
        """The rows, with these runs of LoRA adapters (see lora.py).  The caller keeps the runs alive."""
        rows = self.rows
        rows.num_lora_runs, rows.lora_runs = (
            (0, None) if runs is None else (len(runs), ctypes.addressof(runs))
        )
        return rows


def view(step_input: StepInput) -> StepView:
    """The C view of a built step, made once."""
    return step_input.derived(StepView, StepView)


def address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()
