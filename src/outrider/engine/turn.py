"""Mutual exclusion of the steps of all engines on one set of weights."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Protocol, TypeVar

from outrider.errors import RequestError


class Turn:
    """Lock around all computation with one target, shared by the engines on it (`LLM.variant`).

    These engines share kernel objects.  Their scratch buffers (logits of the last forward, picked tokens,
    states of a fallback model) serve one forward at a time.  The lock therefore covers whole steps.  Scratch
    inside the C kernels is per thread.
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.owner: int | None = None

    def refuse_reentry(self) -> None:
        """Raise RequestError if the calling thread is inside a step."""
        # An interrupt may leave `owner` set without the lock.
        if self.owner == threading.get_ident() and self.lock.locked():
            raise RequestError(
                "the engine cannot be called from inside its own step (for instance from a logits "
                "processor): only abort can; call it between steps."
            )

    @contextmanager
    def taken(self) -> Iterator[None]:
        """Hold the lock for the duration of the block.  Raises RequestError on re-entry."""
        self.refuse_reentry()
        with self.lock:
            self.owner = threading.get_ident()
            try:
                yield
            finally:
                self.owner = None


class _Turned(Protocol):
    turn: Turn


E = TypeVar("E", bound=_Turned)
T = TypeVar("T")


def in_turn(method: Callable[[E], T]) -> Callable[[E], T]:
    """Decorate a method to run under `self.turn`.

    Does not use `taken`: an interrupt could come between its lock and the body.
    """

    @wraps(method)
    def run(self: E) -> T:
        turn = self.turn
        turn.refuse_reentry()
        with turn.lock:
            turn.owner = threading.get_ident()
            try:
                return method(self)
            finally:
                turn.owner = None

    return run
