"""Graphs of a device: the launches of a computation, recorded once and replayed for the same padded sizes.

A launch from Python takes longer than most kernels of a small step, and a step has some ten launches a layer.
Steps are padded to a menu of sizes (`jobs.py`), so that few graphs serve them all.  A graph reads its own
tensors, which a step is copied into before the replay.  Rows that pad a step store nothing, and their results
are not read.  A row's result does not depend on other rows, so padding does not change a bit.

A job that comes for the first time is computed without a graph, in the graph's own tensors, which compiles
all its kernels.  Then the graph is recorded and replayed.  So a step takes its usual time from the first on,
but for work that is done once (`core/clock.py`).
"""

from __future__ import annotations

import logging
import os
import threading
import weakref
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from outrider.core.clock import one_time_work

MOST_GRAPHS, MOST_BYTES = 128, 4 << 30
IDLE_CALLS = 4096  # a graph makes room for another if it was not used in so many calls
RECORDING = threading.Lock()  # torch allows one recording at a time in a process
log = logging.getLogger("outrider")

Results = tuple[Tensor, ...]
Replay = Callable[[], Results]  # returns the results, always in the same memory


class Job(Protocol):
    """A computation whose launches may be recorded.

    sizes: padded; named in messages.
    uses:  objects whose memory it reads and writes; a graph goes with them
    rest:  what its launches depend on besides
    """

    @property
    def sizes(self) -> tuple[Any, ...]: ...
    @property
    def uses(self) -> tuple[Any, ...]: ...
    @property
    def rest(self) -> tuple[Any, ...]: ...

    def inputs(self) -> Any:
        """New tensors with what `compute` reads, of the padded sizes."""

    def load(self, inputs: Any) -> None:
        """Replace what they hold."""

    def compute(self, inputs: Any) -> Results: ...


class Recorder(Protocol):
    def record(self, run: Callable[[], Results]) -> Replay:
        """Record the launches of `run`, without computing; the result repeats them on the same memory.

        Raises RuntimeError if memory is short or an operation cannot be recorded.
        """

    def reserved(self) -> int:
        """Bytes that the device's allocator holds."""


class CudaRecorder:
    """Recorder of CUDA graphs, which share the memory of what they compute in between."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.memory = device, torch.cuda.graph_pool_handle()

    def record(self, run: Callable[[], Results]) -> Replay:
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.current_stream(self.device)
        try:
            with RECORDING, torch.cuda.graph(graph, pool=self.memory, capture_error_mode="thread_local"):
                results = run()
        finally:
            torch.cuda.set_stream(stream)  # a recording that fails leaves its own

        def replay() -> Results:
            graph.replay()
            return results

        return replay

    def reserved(self) -> int:
        torch.cuda.empty_cache()  # as a recording does
        return int(torch.cuda.memory_reserved(self.device))


def graphs_for(device: torch.device) -> Graphs | None:
    """Graphs of a CUDA device; OUTRIDER_GRAPHS=0 leaves them out."""
    if device.type != "cuda" or os.environ.get("OUTRIDER_GRAPHS") == "0":
        return None
    return Graphs(CudaRecorder(device))


@dataclass
class Graph:
    """used: its last call, by number.  bytes: memory that its recording took."""

    inputs: Any
    replay: Replay
    used: int
    bytes: int


class Graphs:
    """Graphs of one backend, by what they use, padded sizes and the rest of their jobs.

    recorded, replayed, failed: how often.
    running: a job is being computed, whose layers are a part of its own graph.
    """

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self.graphs: dict[tuple[Any, ...], Graph] = {}  # the one used last is at the end
        self.refused = Counter[tuple[Any, ...]]()  # calls until another attempt
        self.watched: set[int] = set()
        self.running = False
        self.calls = self.recorded = self.replayed = self.failed = 0

    @property
    def bytes(self) -> int:
        """Memory that the recordings of all graphs took."""
        return sum(graph.bytes for graph in self.graphs.values())

    def run(self, job: Job) -> Results:
        """The results of a job, valid until the next call."""
        assert not self.running, "a job does not run another"
        key = (*map(id, job.uses), type(job), job.sizes, *job.rest)
        self.calls += 1
        if key not in self.graphs and not self._recorded(key, job):
            inputs = job.inputs()
            return self._alone(lambda: job.compute(inputs))
        graph = self.graphs[key] = self.graphs.pop(key)
        graph.used, self.replayed = self.calls, self.replayed + 1
        job.load(graph.inputs)
        return self._alone(graph.replay)

    def _alone(self, run: Callable[[], Results]) -> Results:
        self.running = True
        try:
            return run()
        finally:
            self.running = False

    def _recorded(self, key: tuple[Any, ...], job: Job) -> bool:
        """Compute a job and record its graph, if there is room and it can be."""
        if self.refused[key] > 0:
            self.refused[key] -= 1
            return False
        if not self._make_room():
            return False
        with one_time_work():
            inputs = job.inputs()
            self._alone(lambda: job.compute(inputs))
            try:
                self._record(key, job, inputs)
            except RuntimeError as error:
                self._refuse(key, job.sizes, error)
                return False
        return True

    def _refuse(self, key: tuple[Any, ...], sizes: tuple[Any, ...], error: RuntimeError) -> None:
        """Leave a job without a graph for IDLE_CALLS of its calls."""
        self.refused[key] = IDLE_CALLS
        level = logging.DEBUG if self.failed else logging.WARNING
        log.log(level, "no CUDA graph of %s, whose steps are launched one by one: %s", sizes, error)
        self.failed += 1

    def _make_room(self) -> bool:
        """Drop the graph used longest ago, if there are many or large ones.  Returns False if it is in use.

        Sizes in turn, more than there is room for, would otherwise be recorded anew at every call.
        """
        if len(self.graphs) < MOST_GRAPHS and self.bytes < MOST_BYTES:
            return True
        oldest = next(iter(self.graphs))
        idle = self.calls - self.graphs[oldest].used > IDLE_CALLS
        if idle:
            del self.graphs[oldest]
        return idle

    def _record(self, key: tuple[Any, ...], job: Job, inputs: Any) -> None:
        for used in job.uses:
            self._watch(used)
        before = self.recorder.reserved()
        replay = self.recorder.record(lambda: self._alone(lambda: job.compute(inputs)))
        self.graphs[key] = Graph(inputs, replay, self.calls, self.recorder.reserved() - before)
        self.recorded += 1
        log.debug("graph %d: %s, %d bytes for all", self.recorded, job.sizes, self.bytes)

    def _watch(self, used: Any) -> None:
        """Drop the graphs of a pool or a stack with it: they use its memory."""
        if id(used) not in self.watched:
            self.watched.add(id(used))
            weakref.finalize(used, self._drop, id(used))

    def _drop(self, used: int) -> None:
        self.watched.discard(used)
        self.graphs = {key: graph for key, graph in list(self.graphs.items()) if used not in key[:2]}
        self.refused = Counter({key: count for key, count in self.refused.items() if used not in key[:2]})
