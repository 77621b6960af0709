"""What is recorded of heads and single layers, and the menu of sizes that steps are padded to."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from outrider.backends.base import AttentionShape, ForwardShape, Launched, LayerKV
from outrider.backends.torch.backend import Stack
from outrider.backends.triton.attention import in_one_part
from outrider.backends.triton.graphs import Graphs, Results
from outrider.backends.triton.plan import Plan, Sizes, aligned, install, load_step, total
from outrider.core.step_input import StepInput, StepTensors

# Rows of a graph; longer steps have none.
ROWS = (1, 2, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
LEAST_KEYS, LEAST_PATH, LEAST_TABLE = 2048, 16, 4096


def padded_rows(rows: int) -> int:
    """The next number of the menu; `rows` itself after its end."""
    return next((more for more in ROWS if more >= rows), rows)


def padded(sizes: Sizes, spec: AttentionShape) -> Sizes | None:
    """Sizes of the menu that a step of these sizes fits in; None if it is too long for a graph.

    spec: of the attention, whose sums have to fit into memory.
    """
    if sizes.rows > ROWS[-1]:
        return None
    rows = padded_rows(sizes.rows)
    keys = max(LEAST_KEYS, _power_of_two(sizes.keys))
    while keys >= 2 * sizes.keys and not in_one_part(spec, rows, keys):
        keys //= 2
    if not in_one_part(spec, rows, keys):
        return None
    path = max(LEAST_PATH, _power_of_two(sizes.path)) if sizes.path else 0
    table = max(LEAST_TABLE, _power_of_two(sizes.table))
    return Sizes(rows, rows, keys, path, table, sizes.pinned)


def _power_of_two(n: int) -> int:
    return 1 << max(0, n - 1).bit_length()


def frame(sizes: Sizes, plan: Plan, ids: Tensor | None = None) -> StepInput:
    """A step of padded sizes that has this plan, for the kernels: of requests of one row each."""
    step = StepInput(sizes.pinned)
    step.length, step.max_seq_len, step.max_path_len = sizes.rows, sizes.keys, sizes.path
    step.query_start = [*range(sizes.rows + 1)]
    install(step, plan.slots.device, plan)
    if ids is not None:
        step.derived(ids.device, lambda _: StepTensors(ids, plan.positions, plan.slots))
    return step


class Call(NamedTuple):
    """Arguments of `Backend.run_layers`, without adapters."""

    stack: Stack
    x: Tensor
    kv: LayerKV
    u: Tensor | None


Run = Callable[[Stack, Tensor, LayerKV, tuple[()], Tensor | None], Tensor]


class Layers:
    """`Job` of `run_layers`.  Its inputs: the numbers of the plan, x and u as in `Call`."""

    def __init__(self, run: Run, call: Call, sizes: Sizes) -> None:
        self.run, self.call, self.sizes = run, call, sizes
        self.uses = call.stack, call.kv.pool
        u = None if call.u is None else (call.u.dtype, call.u.shape[1])
        self.rest = call.kv.layer, call.x.dtype, u, call.u is call.x

    def inputs(self) -> tuple[Tensor, Tensor, Tensor | None]:
        x, u = self.call.x.new_zeros(self.sizes.rows, self.call.x.shape[1]), self.call.u
        if u is not None:
            u = x if u is self.call.x else u.new_zeros(self.sizes.rows, u.shape[1])
        inputs = torch.zeros(total(self.sizes), dtype=torch.int32, device=x.device), x, u
        self.load(inputs)
        return inputs

    def load(self, inputs: tuple[Tensor, Tensor, Tensor | None]) -> None:
        (flat, x, u), step = inputs, self.call.kv.step_input
        load_step(flat, array("i"), step, self.sizes)
        x[: len(self.call.x)].copy_(self.call.x)
        if u is not None and self.call.u is not None:
            u[: len(self.call.u)].copy_(self.call.u)

    def compute(self, inputs: tuple[Tensor, Tensor, Tensor | None]) -> Results:
        flat, x, u = inputs
        kv = self.call.kv._replace(step_input=frame(self.sizes, Plan.of(flat, self.sizes)))
        return (self.run(self.call.stack, x, kv, (), u),)


def method_sizes(shape: ForwardShape | None, rows: Sequence[Tensor]) -> Sizes | None:
    """The padded sizes of a method's step, or of its rows alone; None if they are too many for a graph."""
    if shape is not None:
        return None if shape.step_input.adapters else padded(Sizes.of(shape.step_input), shape.attention)
    many = len(rows[0])
    return Sizes(padded_rows(many), 0, 0, 0, 0, 0) if many <= ROWS[-1] else None


class Method:
    """`Job` of `Backend.launch`.  Its inputs: ids and the numbers of the plan, and the padded rows."""

    def __init__(
        self,
        method: Launched,
        shape: ForwardShape | None,
        rows: Sequence[Tensor],
        fixed: tuple[Any, ...],
        sizes: Sizes,
    ) -> None:
        self.method, self.shape, self.rows, self.fixed, self.sizes = method, shape, rows, fixed, sizes
        owner: Any = getattr(method, "__self__")  # noqa: B009 - of a bound method
        self.uses = owner, owner if shape is None else shape.pool
        self.rest = method.__qualname__, *fixed, *((part.shape[1:], part.dtype) for part in rows)
        self.ids = 0 if shape is None else aligned(sizes.rows)

    def inputs(self) -> tuple[Tensor, list[Tensor]]:
        rows = [part.new_zeros(self.sizes.rows, *part.shape[1:]) for part in self.rows]
        length = 0 if self.shape is None else self.ids + total(self.sizes)
        inputs = torch.zeros(length, dtype=torch.int32, device=self.rows[0].device), rows
        self.load(inputs)
        return inputs

    def load(self, inputs: tuple[Tensor, list[Tensor]]) -> None:
        flat, rows = inputs
        for to, part in zip(rows, self.rows):
            to[: len(part)].copy_(part)
        if self.shape is None:
            return
        step = self.shape.step_input
        ids = array("i", step.input_ids)
        ids.extend([0] * (self.ids - len(ids)))
        load_step(flat, ids, step, self.sizes)

    def compute(self, inputs: tuple[Tensor, list[Tensor]]) -> Results:
        flat, rows = inputs
        if self.shape is None:
            return self.method(None, None, *rows, *self.fixed)
        step = frame(self.sizes, Plan.of(flat[self.ids :], self.sizes), flat[: self.sizes.rows])
        return self.method(step, self.shape.pool, *rows, *self.fixed)


def run_layers(graphs: Graphs, run: Run, call: Call) -> Tensor:
    """The result of `run`, by a graph if it is worth one."""
    stack, x, kv, u = call
    sizes = None
    if stack.layers and not graphs.running:
        sizes = padded(Sizes.of(kv.step_input), stack.layers[0])
    if sizes is None:
        return run(stack, x, kv, (), u)
    return graphs.run(Layers(run, call, sizes))[0][: len(x)].clone()
