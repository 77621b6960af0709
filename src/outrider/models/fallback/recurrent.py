"""Recurrences of transformers' modelling code on our states and kernels.

    modelling code -> its functions for convolutions and recurrences (recurrences.py) -> RecurrentCall.run ->
    kernels over the path of each row, from the states of its request

Rows of the step come after the nodes that it replays, of which only the states count.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import torch
from torch import Tensor

from outrider.backends.recurrence import Recurrence
from outrider.backends.recurrent_path import RecurrentPath, path_of
from outrider.cache.states import StatePool, StateShape
from outrider.core.step_input import StepInput

T = TypeVar("T")


@dataclass
class Recurrences:
    """The recurrences of a model, in the order in which its forward calls them.

    shapes:    of their states, recorded by a dry run
    constants: what each derives from its weights
    """

    shapes: list[StateShape] = field(default_factory=list)
    constants: dict[int, object] = field(default_factory=dict)


class RecurrentCall:
    """The recurrences of one forward.  Without a pool it is a dry run, which records the shapes of states."""

    def __init__(
        self, kernels: Recurrence, step_input: StepInput, model: Recurrences, pool: StatePool | None
    ) -> None:
        self.kernels, self.step_input, self.model, self.pool = kernels, step_input, model, pool
        self.index = 0

    def constant(self, make: Callable[[], T]) -> T:
        """What `make` derives from the weights of the next recurrence, made once."""
        if self.index not in self.model.constants:
            self.model.constants[self.index] = make()
        made: T = self.model.constants[self.index]  # type: ignore[assignment]
        return made

    def run(
        self, function: Callable[..., Tensor], inputs: Sequence[Tensor], shape: tuple[int, ...]
    ) -> Tensor:
        """Outputs [N, …] of the next recurrence for the rows of the step.

        function: of the inputs of all rows [n, …], the path and the states
        inputs:   of the rows of the step, [N, …] each
        shape:    of one state
        """
        rows, index = self.step_input.derived(RecurrentPath, path_of), self.index
        self.index += 1
        if self.pool is None:
            size = sum(x[0].numel() * x.element_size() for x in inputs)
            self.model.shapes.append(StateShape(shape, size))
            states = torch.zeros(rows.path.num_slots, *shape, device=inputs[0].device)
            return function(*inputs, rows.path, states)
        self.pool.grow(rows.path.num_slots)
        inputs = rows.with_replays(inputs, self.pool, index)
        out = function(*inputs, rows.path, self.pool.states[index])
        return out[len(rows.replayed) :]
