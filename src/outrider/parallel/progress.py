"""Progress of a rank's transfers.  Heartbeats carry it to rank 0: it shows a lost link of two other ranks.

HostProgress    gloo: a thread waits for its transfer
DeviceProgress  NCCL: the host only queues transfers, and events in the GPU's stream mark their end
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

import torch

POLL_INTERVAL = 2e-5  # seconds between two looks at a tensor that a GPU of rank 0 receives


class Progress(Protocol):
    """Completed transfers, and those that are under way."""

    def completed(self) -> int: ...

    def waits(self, thread: int) -> bool:
        """Whether the work of a thread, by its identifier, waits for a transfer."""

    def wait(self, work: Any) -> None:
        """Order what this thread does next behind a transfer of torch."""

    def result(self, work: Any) -> Callable[[], object]:
        """A call that returns once a tensor has been received.  It may run in another thread."""

    def end(self) -> None:
        """Let the calls of `result` raise ConnectionError."""


class HostProgress:
    """Transfers that a thread waits for."""

    def __init__(self) -> None:
        self._waiting, self._completed = set[int](), 0  # threads

    def completed(self) -> int:
        return self._completed

    def waits(self, thread: int) -> bool:
        return thread in self._waiting

    def wait(self, work: Any) -> None:
        thread = threading.get_ident()
        self._waiting.add(thread)
        try:
            work.wait()
        finally:
            self._waiting.discard(thread)
            self._completed += 1

    def result(self, work: Any) -> Callable[[], object]:
        return partial(self.wait, work)

    def end(self) -> None:
        pass  # gloo's transfers fail with the connections


class DeviceProgress:
    """Transfers in the stream of a GPU, by an event behind each: a transfer itself would hold its tensors."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._lock = device, threading.Lock()
        self._events, self._spare = deque[Any](), list[Any]()  # behind queued transfers, in order; completed
        self._queued, self._completed, self._ended = 0, 0, False

    def completed(self) -> int:
        with self._lock:
            while self._events and self._events[0].query():
                self._spare.append(self._events.popleft())
                self._completed += 1
            return self._completed

    def waits(self, thread: int) -> bool:
        """Whether the GPU has transfers that are not complete.  The host may do other work."""
        return self.completed() < self._queued

    def wait(self, work: Any) -> None:
        work.wait()
        self.completed()
        cuda: Any = torch.cuda
        with self._lock:
            event = self._spare.pop() if self._spare else cuda.Event()
            event.record(cuda.current_stream(self._device))
            self._events.append(event)
            self._queued += 1

    def result(self, work: Any) -> Callable[[], object]:
        """The call waits on the host: after the loss of a rank, a read of the GPU would not return."""
        return partial(self._received, work, self._queued)

    def _received(self, work: Any, queued: int) -> None:
        """Return once a transfer and so many before it are complete."""
        while not (work.is_completed() and self.completed() >= queued):
            if self._ended:
                raise ConnectionError("the ranks have been ended")
            time.sleep(POLL_INTERVAL)
        work.wait()

    def end(self) -> None:
        self._ended = True
