"""How long a test waits before it counts as hanging, and a processor by which it holds a request."""

from __future__ import annotations

import threading
from typing import Any

# Seconds.  A stopped machine or container reaches no such limit by chance; a lock or a lost event does.
HANG = 120.0


class Gate:
    """Logits processor that holds the engine's step behind `at` output tokens until `opened` is set.

    So a request cannot end, however slow the test's own thread is.  `reached` is set once it is held.
    """

    def __init__(self, at: int) -> None:
        self.at, self.reached, self.opened = at, threading.Event(), threading.Event()

    def __call__(self, ids: list[int], logits: Any) -> Any:
        if len(ids) == self.at:
            self.reached.set()
            assert self.opened.wait(HANG), "the test has not opened the gate"
        return logits
