"""Full garbage collections are rare while requests run.

One walks through all objects of the process, of which the libraries alone have hundreds of thousands, and
stops all threads for up to a quarter of a second: as long as fifty steps.
"""

from __future__ import annotations

import gc
import threading

RARER = 100  # times as rare as usual


class RareCollections:
    """A block, also in several threads at once, in which full collections are rarer.

    running: threads that are in it.  usual: thresholds of before; raised: those of the block.
    """

    def __init__(self) -> None:
        self.lock, self.running = threading.Lock(), 0
        self.usual = self.raised = gc.get_threshold()

    def __enter__(self) -> None:
        with self.lock:
            self.running += 1
            if self.running == 1:
                young, middle, old = self.usual = gc.get_threshold()
                self.raised = young, middle, RARER * old
                gc.set_threshold(*self.raised)

    def __exit__(self, *error: object) -> None:
        with self.lock:
            self.running -= 1
            if not self.running and gc.get_threshold() == self.raised:  # nobody else has set them meanwhile
                gc.set_threshold(*self.usual)


rare_collections = RareCollections()


def set_apart() -> None:
    """Let collections leave out all objects there are now, in a process that keeps them to its end."""
    gc.collect()
    gc.freeze()
