"""Work and times of steps."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from threading import get_ident
from time import perf_counter
from typing import NamedTuple

from outrider.core.step import Batch, RowStep


class Times(NamedTuple):
    """Seconds of one step: drafting, the target's forward, everything else."""

    propose: float = 0.0
    forward: float = 0.0
    rest: float = 0.0


# By thread.  `threading.local` takes 5 µs right behind a forward.
_seconds: dict[int, float] = {}  # of one-time work; empty as long as there was none, as on a CPU
_taken: dict[int, float] = {}  # up to which `take_one_time` has returned them
_recordings: dict[int, int] = {}  # still allowed in the step of this thread
_at_once: set[int] = set()  # every computation is recorded when it comes up for the first time


@contextmanager
def one_time_work(share: float = 1.0) -> Iterator[None]:
    """Leave the time of this block, such as compiling kernels, out of `working_time` of this thread.

    share: the part of that time that is left out, 1.0 for all
    """
    began = perf_counter()
    try:
        yield
    finally:
        add_one_time(share * (perf_counter() - began))


def add_one_time(seconds: float) -> None:
    """Leave seconds that have just passed out of `working_time` of this thread."""
    thread = get_ident()
    _seconds[thread] = _seconds.get(thread, 0.0) + seconds


def one_time() -> tuple[int, float]:
    """This thread, and the seconds of its one-time work so far."""
    thread = get_ident()
    return thread, _seconds.get(thread, 0.0)


def take_one_time(since: tuple[int, float]) -> float:
    """Seconds of one-time work since a value of `one_time`, without those that were taken before.

    0 in another thread: a step that is begun ahead may be completed by the next driver.
    """
    thread, seconds = since
    if thread != get_ident() or thread not in _seconds:
        return 0.0
    seconds, _taken[thread] = max(seconds, _taken.get(thread, 0.0)), _seconds[thread]
    return _seconds[thread] - seconds


class OneRecording:
    """Allow one recording of a graph in this block, a step: several would stall it."""

    def __enter__(self) -> None:
        _recordings[get_ident()] = 1

    def __exit__(self, *error: object) -> None:
        _recordings.pop(get_ident(), None)  # a logits processor may run steps of another engine


one_recording = OneRecording()  # no generator: it is entered in every step


def may_record() -> bool:
    """Whether a graph may be recorded now.  It counts as recorded."""
    thread = get_ident()
    left = _recordings.get(thread)
    if left is None or thread in _at_once:
        return True
    _recordings[thread] = 0
    return left > 0


@contextmanager
def record_at_once() -> Iterator[None]:
    """Record the graphs of all computations of this block, however rare they are, and several in a step."""
    thread = get_ident()
    _at_once.add(thread)
    try:
        yield
    finally:
        _at_once.discard(thread)


def records_at_once() -> bool:
    """Whether this thread is in a block of `record_at_once`."""
    return get_ident() in _at_once


def working_time() -> float:
    """`perf_counter` without one-time work: differences are seconds that the same work will take again."""
    now = perf_counter()
    return now - _seconds.get(get_ident(), 0.0) if _seconds else now


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
