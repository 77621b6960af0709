"""Mutual exclusion of the steps of all engines on one set of weights."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from outrider.errors import RequestError


class Turn:
    """Lock around everything that computes with one target, shared by the engines on it (`LLM.variant`).

    These engines share kernel objects, whose scratch (logits of the last forward, picked tokens, states of a fallback model)
    belongs to one forward at a time.  Scratch inside the C kernels is per thread.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._owner: int | None = None

    def refuse_reentry(self) -> None:
        """Raise RequestError in a thread that is inside a step already."""
        if self._owner == threading.get_ident():
            raise RequestError(
                "the engine cannot be called from inside its own step (for instance from a logits processor): only "
                "abort can; call it between steps."
            )

    @contextmanager
    def taken(self) -> Iterator[None]:
        """Wait until no other thread computes, and keep others out.  Raises RequestError on re-entry."""
        self.refuse_reentry()
        with self._lock:
            self._owner = threading.get_ident()
            try:
                yield
            finally:
                self._owner = None
