"""The states of a model's recurrences, addressed by state slot.  `pages.py` allocates the slots."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor


class StateShape(NamedTuple):
    """Shape of the float32 state of one recurrence, and the bytes of the inputs of one token."""

    shape: tuple[int, ...]
    input_bytes: int

    def bytes(self, nodes: int) -> int:
        """Bytes of one state and of the inputs of `nodes` draft nodes."""
        return 4 * math.prod(self.shape) + nodes * self.input_bytes


class StatePool:
    """States of all recurrences of one model, in the order in which a forward calls them.

    states: for each recurrence, float32 [slots, …]
    input_bytes: for each recurrence, as in `StateShape`
    kept:   for each recurrence, the inputs of the draft nodes of the last forward
    planned_nodes: draft nodes of a forward for whose inputs the plan of the memory has room
    addresses: what a backend has derived from the places of the states in memory; None after they moved

    A pool grows by itself with the slots that are used; `grow` allocates them ahead.
    """

    def __init__(self, shapes: Sequence[StateShape], device: torch.device) -> None:
        self.states = [torch.zeros(0, *shape, device=device) for shape, _ in shapes]
        self.input_bytes = [shape.input_bytes for shape in shapes]
        self.kept: list[Sequence[Tensor]] = [() for _ in shapes]
        self.planned_nodes = 0
        self.addresses: Any = None

    def grow(self, slots: int) -> None:
        """Have at least so many slots."""
        for i, state in enumerate(self.states):
            if (missing := slots - len(state)) > 0:
                self.addresses = None
                more = state.new_zeros(missing, *state.shape[1:])
                self.states[i] = torch.cat([state, more]) if len(state) else more

    def copy(self, source: int, target: int) -> None:
        """Copy the states of a slot to another one."""
        for state in self.states:
            state[target].copy_(state[source])
