"""Graphs of decoder blocks: their launches, recorded once and replayed for steps of the same padded sizes.

A launch from Python takes longer than most kernels of a small step, and a step has some ten launches a layer.
Steps are padded to a menu of sizes (`padded`), so that few graphs serve them all.  A graph reads its own
tensors, which a step is copied into before the replay.  Rows that pad a step store nothing, and their results
are not read.  Kernels compute a row alike in any company, so padding does not change a bit.

The first step of some sizes is computed without a graph, for shapes that come once are not worth one.  The
second is, too, in the graph's own tensors, which compiles all its kernels; then the graph is recorded.
"""

from __future__ import annotations

import logging
import os
import threading
import weakref
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from outrider.backends.base import LayerKV
from outrider.backends.torch.backend import Stack
from outrider.backends.triton.attention import in_one_part
from outrider.backends.triton.plan import Plan, Sizes, load_paths, numbers_of, plan_of, total
from outrider.cache.pool import Pool
from outrider.core.step_input import StepInput

ROWS = (1, 2, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)  # of a graph; longer steps have none
LEAST_KEYS, LEAST_PATH, LEAST_TABLE = 256, 4, 4096
MOST_GRAPHS, IDLE_CALLS = 64, 4096  # a graph makes room for another if it was not used in so many calls
MOST_COUNTED = 4096  # sizes that are counted before they get a graph
RECORDING = threading.Lock()  # torch allows one recording at a time in a process
log = logging.getLogger("outrider")


class Call(NamedTuple):
    """Arguments of `Backend.run_layers`, without adapters."""

    stack: Stack
    x: Tensor
    kv: LayerKV
    u: Tensor | None


Run = Callable[[Stack, Tensor, LayerKV, tuple[()], Tensor | None], Tensor]
Replay = Callable[[], Tensor]  # returns the result, always in the same memory


class Recorder(Protocol):
    def record(self, run: Callable[[], Tensor]) -> Replay:
        """What does again what `run` does, on the same memory.  Nothing is computed now.

        Raises RuntimeError if memory is short or an operation cannot be recorded.
        """

    def reserved(self) -> int:
        """Bytes that the device's allocator holds."""


class CudaRecorder:
    """Recorder of CUDA graphs, which share the memory of what they compute in between."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.memory = device, torch.cuda.graph_pool_handle()

    def record(self, run: Callable[[], Tensor]) -> Replay:
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.current_stream(self.device)
        try:
            with RECORDING, torch.cuda.graph(graph, pool=self.memory, capture_error_mode="thread_local"):
                result = run()
        finally:
            torch.cuda.set_stream(stream)  # a recording that fails leaves its own

        def replay() -> Tensor:
            graph.replay()
            return result

        return replay

    def reserved(self) -> int:
        torch.cuda.empty_cache()  # as a recording does
        return int(torch.cuda.memory_reserved(self.device))


def graphs_for(device: torch.device) -> Graphs | None:
    """Graphs of a CUDA device; OUTRIDER_GRAPHS=0 leaves them out."""
    if device.type != "cuda" or os.environ.get("OUTRIDER_GRAPHS") == "0":
        return None
    return Graphs(CudaRecorder(device))


def padded(sizes: Sizes) -> Sizes:
    """Sizes of the menu that a step of these sizes fits in."""
    rows = next(rows for rows in ROWS if rows >= sizes.rows)
    path = max(LEAST_PATH, _power_of_two(sizes.path)) if sizes.path else 0
    keys, table = max(LEAST_KEYS, _power_of_two(sizes.keys)), max(LEAST_TABLE, _power_of_two(sizes.table))
    return Sizes(rows, rows, keys, path, table, sizes.pinned)


def _power_of_two(n: int) -> int:
    return 1 << (n - 1).bit_length()


@dataclass
class Inputs:
    """The tensors that a graph reads: the numbers of a plan of some sizes, and x and u as in `Call`."""

    sizes: Sizes
    flat: Tensor
    x: Tensor
    u: Tensor | None

    @staticmethod
    def of(call: Call, sizes: Sizes) -> Inputs:
        """Tensors with the step of `call`."""
        x, u = call.x.new_zeros(sizes.rows, call.x.shape[1]), call.u
        if u is not None:
            u = x if u is call.x else u.new_zeros(sizes.rows, u.shape[1])
        inputs = Inputs(sizes, torch.zeros(total(sizes), dtype=torch.int32, device=x.device), x, u)
        inputs.load(call)
        return inputs

    def load(self, call: Call) -> None:
        """Copy a step into the tensors."""
        numbers = torch.frombuffer(numbers_of(call.kv.step_input, self.sizes), dtype=torch.int32)
        self.flat[: len(numbers)].copy_(numbers, non_blocking=True)
        load_paths(Plan.of(self.flat, self.sizes), call.kv.step_input, self.sizes)
        self.x[: len(call.x)].copy_(call.x)
        if self.u is not None and call.u is not None:
            self.u[: len(call.u)].copy_(call.u)

    def frame(self) -> StepInput:
        """A step that has the plan, for the kernels: of requests of one row each."""
        sizes, frame = self.sizes, StepInput(self.sizes.pinned)
        frame.length, frame.max_seq_len, frame.max_path_len = sizes.rows, sizes.keys, sizes.path
        frame.query_start = [*range(sizes.rows + 1)]
        frame.derived((plan_of, self.x.device), lambda _: Plan.of(self.flat, sizes))
        return frame


@dataclass
class Graph:
    """used: its last call, by number"""

    inputs: Inputs
    replay: Replay
    used: int


class Graphs:
    """Graphs of one backend, by stack, pool and padded sizes.

    recorded, replayed, failed: how often.  bytes: memory that the recordings took.
    """

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self.graphs: dict[tuple[Any, ...], Graph] = {}  # the one used last is at the end
        self.seen = Counter[tuple[Any, ...]]()
        self.watched: set[int] = set()
        self.calls = self.recorded = self.replayed = self.failed = self.bytes = 0

    def run(self, run: Run, call: Call) -> Tensor:
        """The result of `run`, by a graph if it is worth one."""
        stack, x, kv, u = call
        if kv.step_input.length > ROWS[-1] or not stack.layers:
            return run(stack, x, kv, (), u)
        sizes = padded(Sizes.of(kv.step_input))
        key = id(stack), id(kv.pool), kv.layer, sizes, u is None, u is x
        self.calls += 1
        if key in self.graphs:
            graph = self.graphs[key] = self.graphs.pop(key)
            graph.used, self.replayed = self.calls, self.replayed + 1
            graph.inputs.load(call)
            return graph.replay()[: len(x)].clone()
        whole = in_one_part(stack.layers[0], sizes.rows, sizes.keys)
        if whole and self._comes_again(key) and self._make_room():
            try:
                return self._recorded(key, run, call, sizes)
            except RuntimeError as error:
                self._refuse(key, error)
        return run(stack, x, kv, (), u)

    def _refuse(self, key: tuple[Any, ...], error: RuntimeError) -> None:
        """Leave sizes without a graph for IDLE_CALLS of their calls."""
        self.seen[key] = -IDLE_CALLS
        level = logging.DEBUG if self.failed else logging.WARNING
        log.log(level, "no CUDA graph of %s, whose steps are launched one by one: %s", key[3], error)
        self.failed += 1

    def _comes_again(self, key: tuple[Any, ...]) -> bool:
        if len(self.seen) > MOST_COUNTED:
            self.seen.clear()
        self.seen[key] += 1
        return self.seen[key] > 1

    def _make_room(self) -> bool:
        """Drop the graph that was used longest ago, if there are many.  Returns False if it is in use.

        Shapes in turn, more than MOST_GRAPHS, would otherwise be recorded anew at every call.
        """
        if len(self.graphs) < MOST_GRAPHS:
            return True
        oldest = next(iter(self.graphs))
        idle = self.calls - self.graphs[oldest].used > IDLE_CALLS
        if idle:
            del self.graphs[oldest]
        return idle

    def _recorded(self, key: tuple[Any, ...], run: Run, call: Call, sizes: Sizes) -> Tensor:
        """Record a graph.  Computes the step of `call` in its tensors before."""
        inputs, before = Inputs.of(call, sizes), self.recorder.reserved()
        stack, kv = call.stack, call.kv._replace(step_input=inputs.frame())
        result = run(stack, inputs.x, kv, (), inputs.u)[: len(call.x)].clone()
        replay = self.recorder.record(lambda: run(stack, inputs.x, kv, (), inputs.u))
        self._watch(kv.pool)
        self._watch(stack)
        self.graphs[key] = Graph(inputs, replay, self.calls)
        self.recorded, self.bytes = self.recorded + 1, self.bytes + self.recorder.reserved() - before
        log.debug("graph %d: %s, %d bytes for all", self.recorded, sizes, self.bytes)
        return result

    def _watch(self, used: Pool | Stack) -> None:
        """Drop the graphs of a pool or a stack with it: they use its memory."""
        if id(used) not in self.watched:
            self.watched.add(id(used))
            weakref.finalize(used, self._drop, id(used))

    def _drop(self, used: int) -> None:
        self.watched.discard(used)
        self.graphs = {key: graph for key, graph in list(self.graphs.items()) if used not in key[:2]}
        self.seen = Counter({key: count for key, count in self.seen.items() if used not in key[:2]})
