"""Work and times of steps."""

from __future__ import annotations

import math
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

from outrider.core.step import Batch, RowStep


class Times(NamedTuple):
    """Seconds of one step: drafting, the target's forward, everything else."""

    propose: float = 0.0
    forward: float = 0.0
    rest: float = 0.0


class _OneTime(threading.local):
    """taken: seconds up to which `take_one_time` has returned them.  recordings: still allowed.

    at_once: whether every computation is recorded when it comes up for the first time.
    """

    seconds = taken = 0.0
    recordings = math.inf
    at_once = False


_ONE_TIME = _OneTime()


@contextmanager
def one_time_work(share: float = 1.0) -> Iterator[None]:
    """Leave the time of this block, such as compiling kernels, out of `working_time` of this thread.

    share: the part of that time that is left out, 1.0 for all
    """
    began = time.perf_counter()
    try:
        yield
    finally:
        _ONE_TIME.seconds += share * (time.perf_counter() - began)


def one_time() -> tuple[int, float]:
    """This thread, and the seconds of its one-time work so far."""
    return threading.get_ident(), _ONE_TIME.seconds


def take_one_time(since: tuple[int, float]) -> float:
    """Seconds of one-time work since a value of `one_time`, without those that were taken before.

    0 in another thread: a step that is begun ahead may be completed by the next driver.
    """
    thread, seconds = since
    if thread != threading.get_ident():
        return 0.0
    seconds, _ONE_TIME.taken = max(seconds, _ONE_TIME.taken), _ONE_TIME.seconds
    return _ONE_TIME.seconds - seconds


class OneRecording:
    """Allow one recording of a graph in this block, a step: several would stall it."""

    def __enter__(self) -> None:
        _ONE_TIME.recordings = 1

    def __exit__(self, *error: object) -> None:
        _ONE_TIME.recordings = math.inf


one_recording = OneRecording()  # no generator: it is entered in every step


def may_record() -> bool:
    """Whether a graph may be recorded now.  It counts as recorded."""
    allowed = _ONE_TIME.recordings > 0 or _ONE_TIME.at_once
    _ONE_TIME.recordings -= allowed
    return allowed


@contextmanager
def record_at_once() -> Iterator[None]:
    """Record the graphs of all computations of this block, however rare they are, and several in a step."""
    _ONE_TIME.at_once = True
    try:
        yield
    finally:
        _ONE_TIME.at_once = False


def records_at_once() -> bool:
    """Whether this thread is in a block of `record_at_once`."""
    return _ONE_TIME.at_once


def working_time() -> float:
    """`perf_counter` without one-time work: differences are seconds that the same work will take again."""
    return time.perf_counter() - _ONE_TIME.seconds


@dataclass(slots=True)
class Work:
    """Sums over steps: rows, known tokens, those of prompts, draft nodes with probes, emitted tokens, and
    seconds by phase, as in `Times`.

    drafts: trees with draft tokens.  drafted, accepted: their tokens, without probes.
    accepted_lengths: accepted tokens of a draft -> drafts.
    """

    steps: int = 0
    rows: int = 0
    known: int = 0
    prompt: int = 0
    nodes: int = 0
    emitted: int = 0
    propose: float = 0.0
    forward: float = 0.0
    rest: float = 0.0
    drafts: int = 0
    drafted: int = 0
    accepted: int = 0
    accepted_lengths: Counter[int] = field(default_factory=Counter)

    @property
    def times(self) -> Times:
        """The seconds by phase."""
        return Times(self.propose, self.forward, self.rest)

    def add(self, batch: Batch, times: Times) -> None:
        """Add a completed step."""
        self.steps += 1
        self.rows += len(batch)
        known = emitted = 0
        for step in batch:
            known += step.known
            emitted += len(step.emitted)
            if step.tree.tokens:
                self._add_draft(step)
        self.known += known
        self.emitted += emitted
        if batch.prefill:
            self.prompt += sum(max(0, min(step.end, step.row.prompt) - step.start) for step in batch)
        self.propose += times.propose
        self.forward += times.forward
        self.rest += times.rest

    def _add_draft(self, step: RowStep) -> None:
        tree = step.tree
        nodes = len(tree.tokens)
        self.nodes += nodes
        if size := nodes - tree.probes:
            accepted = len(step.accepted)
            self.drafts += 1
            self.drafted += size
            self.accepted += accepted
            self.accepted_lengths[accepted] += 1
