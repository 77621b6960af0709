"""What drafters learn from requests with a cache_salt, apart from what they learn from all others.

Draft tokens show in the time and the usage of a request.  Those of one salt therefore come from requests of
that salt only, as cached pages do.  Learned weights are the exception: they draft for all requests, and learn
from those without a salt (online/texts.py).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Generic, TypeVar

from outrider.core.row import Row

T = TypeVar("T")
MOST_SALTS = 16  # whose memory is kept, beside those of running rows; the least recently used one is evicted


class SaltedMemory(Generic[T]):
    """Memories of a drafter, one for each cache_salt.

    kept: of the last MOST_SALTS salts.  rows: of running rows, kept as long as the row runs.
    """

    def __init__(self, create: Callable[[], T]) -> None:
        self.create = create
        self.kept: OrderedDict[str, T] = OrderedDict()
        self.rows: dict[Row, T] = {}

    def of(self, row: Row) -> T:
        """The memory of a row's salt, empty if it is new."""
        memory = self.rows.get(row)
        if memory is None:
            assert row.cache_salt is not None
            memory = self.kept.get(row.cache_salt)
            if memory is None:
                memory = self.kept[row.cache_salt] = self.create()
            self.kept.move_to_end(row.cache_salt)
            if len(self.kept) > MOST_SALTS:
                self.kept.popitem(last=False)
            self.rows[row] = memory
        return memory

    def forget(self, row: Row) -> None:
        """Drop a row that ended."""
        self.rows.pop(row, None)


def share(count: int) -> int:
    """Limit of the memory of one salt: 1 / MOST_SALTS of the limit `count` of all, rounded up."""
    return -(-count // MOST_SALTS)
