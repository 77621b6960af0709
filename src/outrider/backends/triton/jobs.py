"""What is recorded of heads and single layers, and the menu of sizes that steps are padded to."""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from outrider.backends.base import LayerKV
from outrider.backends.launch import RECORDED_ROWS, AttentionShape, Call, Launched, launched
from outrider.backends.torch.backend import Stack
from outrider.backends.triton.attention import in_one_part
from outrider.backends.triton.graphs import LAUNCHED, LAUNCHED_DRAFT, Graphs, Results
from outrider.backends.triton.plan import (
    Plan,
    Sizes,
    Tables,
    aligned,
    columns_of,
    install,
    load,
    load_step,
    total,
)
from outrider.core.device import power_of_two
from outrider.core.step_input import StepInput, StepTensors

# Rows of a graph; longer steps have none.  Tiles of the linears have 16 to 256 rows, so that rows which pad
# a step hardly cost anything up to the next power of two.
ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, RECORDED_ROWS)
# Rows that add as much as the first one takes: 65, padded to 128, take 1.63 to 1.85 times as long on an H200.
ROWS_AS_LONG = 160
LEAST_KEYS, LEAST_PATH = 2048, 16


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
    keys = max(LEAST_KEYS, power_of_two(sizes.keys))
    while keys >= 2 * sizes.keys and not in_one_part(spec, rows, keys):
        keys //= 2
    if not in_one_part(spec, rows, keys):
        return None
    path = max(LEAST_PATH, power_of_two(sizes.path)) if sizes.path else 0
    # of few sizes, for it costs memory alone: a load has only the slots that are there
    table = max(rows * LEAST_KEYS, power_of_two(sizes.table))
    return Sizes(rows, rows, keys, path, table, sizes.pinned)


def cost_of(*rows: int) -> float:
    """`Job.cost` of forwards of these numbers of rows."""
    return sum(1 + n / ROWS_AS_LONG for n in rows)


def frame(sizes: Sizes, plan: Plan, ids: Tensor | None = None) -> StepInput:
    """A step of padded sizes that has this plan, for the kernels: of requests of one row each."""
    step = StepInput(sizes.pinned)
    step.length, step.max_seq_len, step.max_path_len = sizes.rows, sizes.keys, sizes.path
    step.query_start = [*range(sizes.rows + 1)]
    install(step, plan.slots.device, plan)
    if ids is not None:
        step.derived(ids.device, lambda _: StepTensors(ids, plan.positions, plan.slots))
        step.device_ids = ids
        step.device_paths = plan.path_slots[: sizes.rows * sizes.path].view(sizes.rows, sizes.path)
    return step


def kind_of(*steps: Sizes) -> tuple[Any, ...]:
    """What larger sizes have to have in common with these: the attention visits all keys of a graph."""
    return tuple((sizes.keys, sizes.path > 0, sizes.pinned) for sizes in steps)


class LayersCall(NamedTuple):
    """Arguments of `Backend.run_layers`, without adapters."""

    stack: Stack
    x: Tensor
    kv: LayerKV
    u: Tensor | None


Run = Callable[[Stack, Tensor, LayerKV, tuple[()], Tensor | None], Tensor]


class Layers:
    """`Job` of `run_layers`.  Its inputs: the numbers of the plan, x and u as in `LayersCall`."""

    launched = LAUNCHED

    def __init__(self, run: Run, call: LayersCall, sizes: Sizes) -> None:
        self.run, self.call, self.sizes = run, call, sizes
        self.uses, self.cost = (call.stack, call.kv.pool), cost_of(sizes.rows)
        u = None if call.u is None else (call.u.dtype, call.u.shape[1])
        self.rest = call.kv.layer, *kind_of(sizes), call.x.dtype, u, call.u is call.x

    def at(self, sizes: tuple[int, ...]) -> Layers:
        return Layers(self.run, self.call, Sizes(*sizes))

    def launch(self) -> Results:
        stack, x, kv, u = self.call
        return (self.run(stack, x, kv, (), u),)

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


NO_STEP = Sizes(0, 0, 0, 0, 0, 0)


class MethodSizes(NamedTuple):
    """Padded sizes of the first step of a method, and of all others, and rows of its numbers.

    The table of `first` is that of all steps: `others` has none, and no rows if there are no others.
    """

    first: Sizes
    others: Sizes
    numbers: tuple[int, ...]

    @staticmethod
    def of(flat: tuple[int, ...]) -> MethodSizes:
        n = len(Sizes._fields)
        return MethodSizes(Sizes(*flat[:n]), Sizes(*flat[n : 2 * n]), flat[2 * n :])


def _tables_of_all(steps: Sequence[StepInput]) -> Tables:
    """The slot tables of the steps of a method, made once."""
    return steps[0].derived((_tables_of_all, len(steps)), lambda _: Tables(steps))


def method_sizes(call: Call) -> MethodSizes | None:
    """The padded sizes of a method's steps; None if one is too long for a graph."""
    shape = call.shape
    first, *others = shape.steps
    if max(step.length for step in shape.steps) > ROWS[-1]:
        return None
    keys = max(step.max_seq_len for step in shape.steps)
    exact = Sizes.of(first, _tables_of_all(shape.steps))._replace(keys=keys)
    room, of_others = min(shape.room, ROWS[-1]), NO_STEP
    of_first = padded(exact._replace(rows=max(exact.rows, room)), shape.attention)
    if others:
        rows = max(shape.level_room, *(step.length for step in others))
        path = max(step.max_path_len for step in others)
        padded_level = padded(exact._replace(rows=rows, path=path), shape.attention)
        if padded_level is None:
            return None
        of_others = padded_level._replace(table=0)
    if of_first is None:
        return None
    return MethodSizes(of_first, of_others, tuple(padded_rows(part.shape[0]) for part in call.numbers))


class Method:
    """`Job` of `Backend.launch`.

    Its inputs: the padded rows, and one array of numbers: those of the call, ids and plan of each step, and
    the slot tables of all.
    """

    def __init__(self, method: Launched, call: Call, padded: MethodSizes) -> None:
        self.method, self.call, self.padded = method, call, padded
        owner: Any = getattr(method, "__self__")  # noqa: B009 - of a bound method
        self.uses = owner, call.shape.pool
        self.sizes = *padded.first, *padded.others, *padded.numbers
        self.shapes = [(n, *part.shape[1:]) for n, part in zip(padded.numbers, call.numbers)]
        rows, widths = (call.rows.shape[1:], call.rows.dtype), [part.shape[1:] for part in call.numbers]
        others = len(call.shape.steps) - 1
        self.rest = method.__qualname__, others, *kind_of(*padded[:2]), *call.fixed, rows, *widths
        self.cost = cost_of(padded.first.rows, *[padded.others.rows] * others)
        self.launched = LAUNCHED_DRAFT if others else LAUNCHED
        self.of_steps = [padded.first, *[padded.others] * others]
        columns = [aligned(s.rows) + total(s._replace(table=0)) - aligned(0) for s in padded[:2]]
        # of the parts of the array, but for the slot tables
        self.lengths = [*(aligned(2 * math.prod(shape)) for shape in self.shapes), columns[0]]
        self.lengths += [columns[1]] * others

    def at(self, sizes: tuple[int, ...]) -> Method:
        return Method(self.method, self.call, MethodSizes.of(sizes))

    def launch(self) -> Results:
        return (launched(self.method, self.call),)

    def inputs(self) -> tuple[Tensor, Tensor]:
        rows = self.call.rows.new_zeros(self.padded.first.rows, *self.call.rows.shape[1:])
        length = sum(self.lengths) + aligned(self.padded.first.table)
        inputs = torch.zeros(length, dtype=torch.int32, device=rows.device), rows
        self.load(inputs)
        return inputs

    def load(self, inputs: tuple[Tensor, Tensor]) -> None:
        (flat, rows), lengths = inputs, iter(self.lengths)
        rows[: len(self.call.rows)].copy_(self.call.rows)
        numbers, tables = array("i"), _tables_of_all(self.call.shape.steps)
        for part in self.call.numbers:
            numbers.frombytes(part.values.tobytes().ljust(4 * next(lengths), b"\0"))
        for step, sizes in zip(self.call.shape.steps, self.of_steps):
            numbers.extend(step.input_ids)
            numbers.extend([0] * (aligned(sizes.rows) - step.length))
            numbers += columns_of(step, sizes, tables)
        load(flat, numbers + tables.slots)

    def compute(self, inputs: tuple[Tensor, Tensor]) -> Results:
        flat, rows = inputs
        *parts, table = flat.split([*self.lengths, len(flat) - sum(self.lengths)])
        numbers = [
            part[: 2 * math.prod(shape)].view(torch.int64).view(shape)
            for part, shape in zip(parts, self.shapes)
        ]
        steps = []
        for part, sizes in zip(parts[len(numbers) :], self.of_steps):
            ids, columns = part[: sizes.rows], part[aligned(sizes.rows) :]
            plan = Plan.of(columns, sizes._replace(table=0))._replace(table_slots=table)
            steps.append(frame(sizes, plan, ids))
        return (self.method(steps, self.call.shape.pool, rows, numbers, *self.call.fixed),)


def run_layers(graphs: Graphs, run: Run, call: LayersCall) -> Tensor:
    """The result of `run`, by a graph if it is worth one."""
    stack, x, kv, u = call
    sizes = None
    if stack.layers and not graphs.running:
        sizes = padded(Sizes.of(kv.step_input), stack.layers[0])
    if sizes is None:
        return run(stack, x, kv, (), u)
    return graphs.run(Layers(run, call, sizes))[0][: len(x)].clone()
