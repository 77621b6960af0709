"""How many threads training uses."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

AGAIN = 16  # a slower number of threads is tried once in so many times


class Parallelism:
    """One thread or all of torch's, whichever was faster.

    A loop over several threads ends with the last of them.  Where other processes use the processors, small
    loops take several times as long on all threads as on one.
    """

    def __init__(self) -> None:
        self.seconds = dict.fromkeys((torch.get_num_threads(), 1), 0.0)  # of a token; 0: not known
        self.uses = 0

    @property
    def count(self) -> int:
        """The number of threads to use next."""
        fastest, *others = sorted(self.seconds, key=self.seconds.__getitem__)
        return others[0] if others and self.uses % AGAIN == AGAIN - 1 else fastest

    def learn(self, count: int, seconds: float) -> None:
        """seconds: of a token, with so many threads."""
        known = self.seconds[count]
        self.seconds[count] = (known + seconds) / 2 if known else seconds
        self.uses += 1

    @contextmanager
    def timed(self, tokens: int) -> Iterator[None]:
        """Use the number of threads in this block, which is always of the same kind of work."""
        count, began = self.count, time.perf_counter()
        with threads(count):
            yield
        self.learn(count, (time.perf_counter() - began) / tokens)


@contextmanager
def threads(count: int) -> Iterator[None]:
    """Let torch use so many threads in this block."""
    before = torch.get_num_threads()
    if count != before:
        torch.set_num_threads(count)
    try:
        yield
    finally:
        if count != before:
            torch.set_num_threads(before)
