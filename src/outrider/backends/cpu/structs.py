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
        self.rows = STRUCTS["Rows"](
            step_input.length,
            step_input.max_path_len,
            step_input.max_seq_len,
            step_input.pinned,
            *(column.buffer_info()[0] for column in columns),
            0,
            None,
        )

    def with_adapters(self, runs: ctypes.Array[Any] | None) -> Any:
        """The rows, with these runs of LoRA adapters (see lora.py).  The caller keeps the runs alive."""
        self.rows.num_lora_runs = 0 if runs is None else len(runs)
        self.rows.lora_runs = None if runs is None else ctypes.addressof(runs)
        return self.rows


def view(step_input: StepInput) -> StepView:
    """The C view of a built step, made once."""
    return step_input.derived(StepView, StepView)


def address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()
