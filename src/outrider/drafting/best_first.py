"""Priority queue of candidate nodes, for trees that grow by the most probable node."""

from __future__ import annotations

import heapq
from typing import Generic, TypeVar

T = TypeVar("T")


class BestFirst(Generic[T]):
    """Priority queue by probability.  Equally probable items leave in order of insertion."""

    def __init__(self) -> None:
        # (-probability, push number, item): items are never compared
        self._heap: list[tuple[float, int, T]] = []
        self._pushed = 0

    def __len__(self) -> int:
        return len(self._heap)

    def push(self, probability: float, item: T) -> None:
        """Add an item with its probability."""
        heapq.heappush(self._heap, (-probability, self._pushed, item))
        self._pushed += 1

    def pop(self) -> tuple[float, T]:
        """Return (probability, item)."""
        negated, _, item = heapq.heappop(self._heap)
        return -negated, item
