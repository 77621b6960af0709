"""All ranks as rank 0 sees them: commands to them, results, and what became of them.

    caller ──call──▶ queue ──▶ thread ──▶ connections ──▶ other ranks     same commands in the same order
                                  └─────▶ rank 0's own stage ──▶ future

One thread sends commands and runs rank 0's stage, so that an interrupt of the caller leaves the ranks in
step.  Another thread watches the connections.  A rank that dies ends its connection; one that freezes sends
no heartbeats.  Either way all ranks are ended, and every call from then on raises the same RankError.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from multiprocessing.connection import Connection, wait
from queue import SimpleQueue
from typing import Any, NamedTuple

from outrider.errors import OutriderError, RankError
from outrider.parallel.links import Answer
from outrider.parallel.messages import MessageKind, Report, Setup, check_same, receive, send, versions
from outrider.parallel.stage import LOAD, Activity, Stage, Stages
from outrider.parallel.start import Ranks

SILENCE = 8.0  # seconds without a heartbeat after which a rank counts as frozen
PAUSE = 1.0  # seconds that a round of `_watch` may be late; beyond, this process has been stopped
START_TIMEOUT = 600.0  # seconds for the other ranks to load, after rank 0 has
STALL = 12.0  # seconds in which no rank computes and no transfer ends: one takes less on any fit network
SETTLING = 0.2  # seconds for the end of a rank to show, after another one has failed
DIAGNOSIS = 2.0  # seconds: a transfer fails before it is known which rank ended
Results = Future[dict[Any, Any]]


class Command(NamedTuple):
    """A command of `Stage` to the model of a number.  own: further arguments on rank 0."""

    future: Results
    number: int
    name: str
    args: tuple[Any, ...]
    own: tuple[Any, ...]


class Group:
    """Rank 0's stage and its connections to the others.  `open` and `begin` come before the first `call`."""

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks
        self.failure: RankError | None = None
        self.dropped: deque[tuple[int, str, int]] = deque()  # commands for what was garbage collected
        self._lock = threading.Lock()
        self._threads: list[threading.Thread] = []
        self._failed, self._closed = threading.Event(), False
        self._numbered, self._begun = itertools.count(1), False
        self._queue: SimpleQueue[Command | None] = SimpleQueue()
        self._awaited: SimpleQueue[tuple[Results, Answer] | None] = SimpleQueue()
        self._messages: SimpleQueue[tuple[int, tuple[Any, ...]]] = SimpleQueue()  # of ranks that load
        self._seen: dict[int, float] = {}  # rank -> when it last sent anything
        self._stages: Stages | None = None
        self._activities: dict[int, Activity] = {}
        self._before, self._moved = dict[int, Activity](), 0.0  # the last that differed, and when
        self._ended: list[int] = []  # ranks whose connection is closed
        self._errors: dict[int, OutriderError | str] = {}  # rank -> error; may follow from another one's end
        self._open = set[Results]()
        self._rank_of: dict[Connection[Any, Any], int] = {}

    # ---- starting

    def open(self, setup: Setup) -> None:
        """Have the other ranks load.

        Raises ConfigError if their versions differ from rank 0's, and RankError if one has ended.
        """
        own = versions()
        for connection in self.ranks.connections:
            rank, found = self._hello(connection)
            check_same(rank, found, own)
            self._rank_of[connection], self._seen[rank] = rank, time.monotonic()
        self._send_all(setup)
        self._run(self._watch)

    def begin(self, stage: Stage, report: Report) -> list[Report]:
        """Wait for the other ranks, connect them, and start to take commands.  Returns all reports.

        Raises the error of a rank that could not load, and ConfigError if its weights or kernels differ.
        """
        reports = self._reports(report, stage.options.layout.size)
        self._begun = True
        self._send_all(None)  # all have loaded
        stages = self._stages = Stages(self.ranks.links(stage.backend.device))
        stages.add(0, stage)
        self._run(lambda: self._compute(stages))
        self._run(self._await_transfers)
        return reports

    def add(self, stage: Stage, report: Report, setup: Setup) -> tuple[int, list[Report]]:
        """Have the other ranks load one more model, of which rank 0 has its part.  Returns its number."""
        number = next(self._numbered)
        self.call(number, LOAD, setup, x=stage).result()
        return number, self._reports(report, setup.options.layout.size)

    def _reports(self, report: Report, size: int) -> list[Report]:
        """Reports of all `size` ranks of a model, once they have loaded it.  report: rank 0's."""
        reports = {0: report}
        while len(reports) < size:
            rank, message = self._next_message()
            if message[0] == MessageKind.FAILED:
                raise self._failure_of(rank, message[1])
            reports[rank] = message[1]
        for rank, found in reports.items():
            check_same(rank, found.facts, report.facts)
        return [reports[rank] for rank in sorted(reports)]

    def _hello(self, connection: Connection[Any, Any]) -> tuple[int, dict[str, str]]:
        """Rank and versions at the other end."""
        deadline = time.monotonic() + START_TIMEOUT
        with contextlib.suppress(EOFError, OSError):
            while connection.poll(max(0.0, deadline - time.monotonic())):
                kind, *content = receive(connection)
                if kind == MessageKind.HELLO:
                    rank, found = content
                    return rank, found
                if kind != MessageKind.BEAT:
                    break
        raise RankError("a rank ended while it started, or did not start in time: see its messages.")

    def _send_all(self, message: object) -> None:
        try:
            send(message, *self.ranks.connections)
        except OSError as error:
            raise self.failure or RankError("a rank ended while it started: see its messages.") from error

    def _next_message(self) -> tuple[int, tuple[Any, ...]]:
        deadline, failure = time.monotonic() + START_TIMEOUT, self.failure
        while time.monotonic() < deadline:
            with contextlib.suppress(Exception):  # with the error of a rank that has ended since
                return self._messages.get(timeout=0.1)
            if failure is not None:
                raise failure
            failure = self.failure
        raise RankError(f"not all ranks have loaded after {START_TIMEOUT:.0f} seconds.")

    # ---- commands

    def call(self, number: int, name: str, *args: Any, x: Any = None) -> Results:
        """Have all ranks run a command of a model's `Stage`.  x: its last argument on rank 0, if given."""
        with self._lock:
            while self.dropped:
                self._submit(*self.dropped.popleft())
            return self._submit(number, name, *args, x=x)

    def _submit(self, number: int, name: str, *args: Any, x: Any = None) -> Results:
        if self.failure is not None:
            raise self.failure
        future = Results()
        self._open.add(future)
        future.add_done_callback(self._open.discard)
        own = () if x is None else (x,)
        self._queue.put(Command(future, number, name, args, own))  # at once: an interrupt may follow
        if self.failure is not None:
            _resolve(future, self.failure)
        return future

    # ---- threads

    def _run(self, target: Callable[[], None]) -> None:
        self._threads.append(threading.Thread(target=target, daemon=True))
        self._threads[-1].start()

    def _compute(self, stages: Stages) -> None:
        """Send every command to the other ranks, and run rank 0's side of it."""
        while (entry := self._queue.get()) is not None:
            future, number, name, args, own = entry
            try:
                send((number, name, args), *self.ranks.connections)
                if name == LOAD:
                    stages.add(number, *own)
                    answer = Answer()
                else:
                    answer = stages.run(number, name, *args, *own)
            except Exception as error:
                self._transfer_failed(error)
                return
            if answer.arrivals:
                self._awaited.put((future, answer))
            else:
                _resolve(future, answer.tensors)

    def _await_transfers(self) -> None:
        """Complete the results that other ranks send, in the order of the commands."""
        while (entry := self._awaited.get()) is not None:
            future, answer = entry
            try:
                tensors = answer.wait()
            except Exception as error:
                self._transfer_failed(error)
                return
            _resolve(future, tensors)

    def _transfer_failed(self, error: Exception) -> None:
        """Rank 0's stage raised, usually because another one ended: let `_watch` say which."""
        if not self._failed.wait(DIAGNOSIS):
            self._fail(f"rank 0 failed with {type(error).__name__}: {error}")

    def _watch(self) -> None:
        """Read the messages of the ranks, and notice those that end or freeze."""
        while not self._closed and self.failure is None:
            began = time.monotonic()
            with contextlib.suppress(OSError, ValueError):  # `close` may be quicker
                self._read_all(SILENCE / 8)
            self._forgive(time.monotonic() - began - SILENCE / 8)
            if self._errors and not self._ended:
                time.sleep(SETTLING)
                self._read_all(0)
            for rank in self._ended:
                self._fail(f"rank {rank} has ended")
            for rank, error in self._errors.items():
                self._fail(f"rank {rank} failed with {error}")
            for rank, seen in self._seen.items():
                if time.monotonic() - seen > SILENCE:
                    self._fail(f"rank {rank} has not answered for {SILENCE:.0f} seconds")
            if self._stalled():
                self._fail(f"no rank has got on for {STALL:.0f} seconds: two of them cannot reach each other")

    def _forgive(self, late: float) -> None:
        """Count no time in which this process was stopped (Ctrl-Z, a paused container) against the ranks."""
        if late > PAUSE:
            now = time.monotonic()
            self._moved = min(now, self._moved + late)
            for rank, seen in self._seen.items():
                self._seen[rank] = min(now, seen + late)

    def _stalled(self) -> bool:
        """Whether commands are open, and all ranks wait for transfers that do not end."""
        now = {0: Activity() if self._stages is None else self._stages.activity, **self._activities}
        if now != self._before or not self._open or any(each.computing for each in now.values()):
            self._before, self._moved = now, time.monotonic()
        return time.monotonic() - self._moved > STALL

    def _read_all(self, timeout: float) -> None:
        for connection in wait(self.ranks.connections, timeout):
            assert isinstance(connection, Connection)
            rank = self._rank_of[connection]
            try:
                message = receive(connection)
            except (EOFError, OSError):
                if rank not in self._errors:
                    self._ended.append(rank)
                continue
            self._seen[rank] = time.monotonic()
            if message[0] == MessageKind.BEAT:
                self._activities[rank] = message[1]
            if message[0] == MessageKind.READY or (message[0] == MessageKind.FAILED and not self._begun):
                self._messages.put((rank, message))
            elif message[0] == MessageKind.FAILED:
                self._errors[rank] = message[1]

    # ---- ending

    def _failure_of(self, rank: int, error: OutriderError | str) -> OutriderError:
        if isinstance(error, OutriderError):
            return type(error)(f"rank {rank}: {error}")
        return RankError(f"rank {rank} could not load: {error}")

    def _fail(self, reason: str) -> None:
        """End all ranks and every open call.  The first reason counts."""
        if self.failure is not None or self._closed:
            return
        self.failure = RankError(
            f"{reason}: the model's {len(self.ranks.connections) + 1} ranks work together only. Load the "
            "model again."
        )
        self._failed.set()
        self.ranks.end()
        for future in list(self._open):
            _resolve(future, self.failure)
        self._abort()

    def _abort(self) -> None:
        if self._stages is not None:
            self._stages.links.abort()

    def close(self) -> None:
        """End the other ranks and the threads."""
        self._closed = True
        self._queue.put(None)
        self._awaited.put(None)
        self.ranks.end()
        self._abort()
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(SILENCE)  # at the interpreter's exit none may be inside torch


def _resolve(future: Results, result: dict[Any, Any] | Exception) -> None:
    """Complete a future, unless another thread already has."""
    with contextlib.suppress(Exception):
        if isinstance(result, Exception):
            future.set_exception(result)
        else:
            future.set_result(result)
