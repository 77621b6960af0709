"""Mutual exclusion of the steps of all engines on one set of weights."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from outrider.errors import RequestError
from outrider.sampling.processors import running_since

STALL = 60.0  # seconds of one call of a logits processor after which a call made during it gives up


T = TypeVar("T")


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

    def check_processor(self, arrival: float) -> bool:
        """Whether a logits processor runs in a step since before `arrival`, the time of a call.

        It may have started the calling thread and wait for it, and then neither would end.  So this raises
        RequestError once the processor takes more than `STALL` seconds.
        """
        began = running_since.get(self.owner or 0, math.inf)
        if began < arrival and time.monotonic() - began > STALL:
            raise RequestError(
                f"a logits processor that was running before this call has taken more than {STALL:g} s, and "
                "may wait for it, while the call waits for its step: a processor cannot use the engine that "
                "calls it."
            )
        return began < arrival

    def wait_for_processor(self, arrival: float) -> None:
        """Return once no logits processor runs that ran at `arrival`.  Raises as `check_processor`."""
        while running_since and self.check_processor(arrival):
            time.sleep(0.01)

    def run(self, step: Callable[[], T]) -> T:
        """The result of a step, which holds the lock.

        Does not use `taken`: an interrupt could come between its lock and the body.
        """
        if self.owner is not None:
            self.refuse_reentry()
        with self.lock:
            self.owner = threading.get_ident()
            try:
                return step()
            finally:
                self.owner = None

    @contextmanager
    def taken(self) -> Iterator[None]:
        """Hold the lock for the duration of the block.

        Raises RequestError on re-entry, and as `check_processor`.
        """
        self.refuse_reentry()
        self.wait_for_processor(time.monotonic())
        with self.lock:
            self.owner = threading.get_ident()
            try:
                yield
            finally:
                self.owner = None
