"""Graphs of a device: the launches of a computation, recorded once and replayed for steps of the same sizes.

A launch from Python takes longer than most kernels of a small step, and a step has some ten launches a layer.
So a launched step takes `LAUNCHED` times as long as a replay, and a draft of several forwards
`LAUNCHED_DRAFT` times.  A recording takes tens of milliseconds, in which nothing else is computed, and every
graph holds memory.  Few graphs have to serve all steps:

- Steps are padded to a menu of sizes (`jobs.py`).
- A graph of larger sizes serves a step, unless padding costs more than launches.
- What a size wastes without a graph of its own adds up, in replays; beyond `WORTH` its graph is recorded.
  So a step is launched a few times first, without padding, and a size that is rare, or served well by a
  larger one, never gets a graph (the ski-rental rule: at most about twice the time of the best choice).
- One graph is recorded in a step of the engine (`core/clock.py`).
- If there is no room, the graph used longest ago goes, if it was not used since the new size came up.

A graph reads its own tensors, which a step is copied into before the replay.  Rows that pad a step store
nothing, and their results are not read.  A row's result does not depend on other rows, so padding does not
change a bit.  A size is computed in the graph's own tensors before it is recorded, which compiles all its
kernels.  This, the recording, and what launches of a size that will have a graph take longer than its replays
are one-time work.
"""

from __future__ import annotations

import logging
import os
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import astuple, dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from outrider.core.clock import may_record, one_time_work, records_at_once

MOST_GRAPHS, MOST_BYTES = 256, 4 << 30
# Time of a launched step over that of its replay: 2.7 to 5.5 on an H200 (docs/benchmarks.md).  Of a draft of
# several levels, whose kernels are shorter: 16 to 20 ms, in place of 2.
LAUNCHED, LAUNCHED_DRAFT = 3.0, 8.0
# Replays that a size wastes before it is recorded: three launches of a step, which waste two each.  A replay
# of a step of 8 B weights takes 5 ms.
WORTH = 5.5
RETRY = 8192.0  # replays that a size wastes after a failed recording before the next attempt
RECORDING = threading.Lock()  # torch allows one recording at a time in a process
log = logging.getLogger("outrider")

Results = tuple[Tensor, ...]
Replay = Callable[[], Results]  # returns the results, always in the same memory


class Job(Protocol):
    """A computation whose launches may be recorded.

    sizes: what it is padded to; a graph of the same job for larger sizes can serve it
    uses:  objects whose memory it reads and writes; a graph goes with them
    rest:  what its launches depend on besides
    cost:  time of a replay, in that of a forward of one row
    launched: time of launches over that of a replay
    """

    @property
    def sizes(self) -> tuple[int, ...]: ...
    @property
    def uses(self) -> tuple[Any, ...]: ...
    @property
    def rest(self) -> tuple[Any, ...]: ...
    @property
    def cost(self) -> float: ...
    @property
    def launched(self) -> float: ...

    def at(self, sizes: tuple[int, ...]) -> Job:
        """The same, padded to larger sizes."""

    def launch(self) -> Results:
        """Compute without a graph, and without padding."""

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
    """cost: of its job.  used: its last call, by number.  bytes: memory that its recording took."""

    inputs: Any
    replay: Replay
    cost: float
    used: int
    bytes: int


@dataclass
class Wish:
    """A size without a graph.

    since: its first call, by number.  wasted: since then, in replays of a graph of its own.
    closed: it came up when there was no room, or its recording failed, so that its launches come again.
    """

    since: int
    wasted: float = 0.0
    closed: bool = False


class Key(NamedTuple):
    """kind: what a job uses, its type and the rest of it."""

    kind: tuple[Any, ...]
    sizes: tuple[int, ...]

    def holds(self, key: Key) -> bool:
        """Whether a job of this kind and these sizes computes another one, too."""
        return self.kind == key.kind and all(has >= needs for has, needs in zip(self.sizes, key.sizes))


@dataclass
class Counts:
    """Sums over graphs.

    recorded, failed, dropped: recordings, those that failed, and graphs that made room for others
    seconds: of recordings.  bytes: memory that those which are kept took.
    replayed, padded: replays, and those by a graph of larger sizes.  launched: jobs without a graph.
    """

    recorded: int = 0
    failed: int = 0
    dropped: int = 0
    seconds: float = 0.0
    bytes: int = 0
    replayed: int = 0
    padded: int = 0
    launched: int = 0


class Graphs:
    """Graphs of one backend.

    wishes: sizes without a graph.  counts: of these graphs.
    running: a job is being computed, whose layers are a part of its own graph.
    """

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self.graphs: dict[Key, Graph] = {}  # the one used last is at the end
        self.wishes: dict[Key, Wish] = {}
        self.watched: set[int] = set()
        self.running, self.calls, self.counts = False, 0, Counts()
        EVERYWHERE.add(self)

    def run(self, job: Job) -> Results:
        """The results of a job, valid until the next call; they may have more rows and levels."""
        assert not self.running, "a job does not run another"
        self.calls += 1
        key = Key((*map(id, job.uses), type(job), *job.rest), job.sizes)
        if key in self.graphs:
            return self._replay(key, job)
        wish = self.wishes.get(key)
        if wish is None:
            wish = self.wishes[key] = Wish(self.calls)
            for used in job.uses:
                self._watch(used)
        now = wish.wasted >= WORTH or (records_at_once() and not wish.closed)
        if now and self._recorded(key, job, wish):
            return self._replay(key, job)
        # of launches: all at first, when they compile kernels, later what a replay will save
        once = 0.0 if wish.closed else 1 - 1 / job.launched if wish.wasted else 1.0
        wider, cost = self._wider(key, job.launched * job.cost)
        wish.wasted += cost / job.cost - 1
        if wider is not None:
            self.counts.padded += 1
            return self._replay(wider, job.at(wider.sizes))
        self.counts.launched += 1
        with one_time_work(once):
            return self._alone(job.launch)

    def _replay(self, key: Key, job: Job) -> Results:
        graph = self.graphs[key] = self.graphs.pop(key)
        graph.used = self.calls
        self.counts.replayed += 1
        job.load(graph.inputs)
        return self._alone(graph.replay)

    def _wider(self, key: Key, most: float) -> tuple[Key | None, float]:
        """The cheapest graph that holds these sizes and costs less than `most`, and its cost or `most`."""
        best = None
        for other, graph in self.graphs.items():
            if graph.cost < most and other.holds(key):
                best, most = other, graph.cost
        return best, most

    def _alone(self, run: Callable[[], Results]) -> Results:
        self.running = True
        try:
            return run()
        finally:
            self.running = False

    def _recorded(self, key: Key, job: Job, wish: Wish) -> bool:
        """Compute a job and record its graph, if that is allowed now, there is room, and it can be."""
        if not may_record() or not self._make_room(wish):
            return False
        began = time.perf_counter()
        with one_time_work():
            inputs = job.inputs()
            self._alone(lambda: job.compute(inputs))
            try:
                self._record(key, job, inputs)
            except RuntimeError as error:
                wish.wasted, wish.closed = -RETRY, True
                level = logging.DEBUG if self.counts.failed else logging.WARNING
                log.log(
                    level, "no CUDA graph of %s, whose steps are launched one by one: %s", key.sizes, error
                )
                self.counts.failed += 1
        self.counts.seconds += time.perf_counter() - began
        return key in self.graphs

    def _make_room(self, wish: Wish) -> bool:
        """Drop the graph used longest ago, if there are many or large ones.

        If that was used since the new size came up, this one has to come up anew: sizes in turn, more than
        there is room for, would otherwise drop the graphs of each other.
        """
        if len(self.graphs) < MOST_GRAPHS and self.counts.bytes < MOST_BYTES:
            return True
        oldest = next(iter(self.graphs))
        if self.graphs[oldest].used >= wish.since:
            wish.since, wish.wasted, wish.closed = self.calls, 0.0, True
            return False
        del self.graphs[oldest]
        self.counts.dropped += 1
        return True

    def _sum_bytes(self) -> None:
        self.counts.bytes = sum(graph.bytes for graph in self.graphs.values())

    def _record(self, key: Key, job: Job, inputs: Any) -> None:
        before = self.recorder.reserved()
        replay = self.recorder.record(lambda: self._alone(lambda: job.compute(inputs)))
        added = self.recorder.reserved() - before
        self.graphs[key] = Graph(inputs, replay, job.cost, self.calls, added)
        del self.wishes[key]
        self.counts.recorded += 1
        self._sum_bytes()
        log.debug("graph %d: %s, %d bytes for all", self.counts.recorded, key.sizes, self.counts.bytes)

    def _watch(self, used: Any) -> None:
        """Drop the graphs and wishes of a pool or a stack with it: graphs use its memory."""
        if id(used) not in self.watched:
            self.watched.add(id(used))
            weakref.finalize(used, self._drop, id(used))

    def _drop(self, used: int) -> None:
        self.watched.discard(used)
        self.graphs = {key: graph for key, graph in list(self.graphs.items()) if used not in key.kind[:2]}
        self._sum_bytes()
        self.wishes = {key: wish for key, wish in list(self.wishes.items()) if used not in key.kind[:2]}


EVERYWHERE = weakref.WeakSet[Graphs]()


def counts_of_all() -> Counts:
    """Sums over the graphs of all backends of this process: of targets, draft models and heads."""
    return Counts(*map(sum, zip(*(astuple(graphs.counts) for graphs in EVERYWHERE))))
