"""Index of the runs of a text by runs.c."""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from outrider.drafting.lookup.index_base import FRONT, PLACES, RUNS, Places, width


@lru_cache(maxsize=2)
def declare(lib: ctypes.CDLL) -> None:
    """Argument types of runs.c."""
    p, n = ctypes.c_void_p, ctypes.c_long
    lib.runs_extend.argtypes = [p, p, n]
    lib.runs_find.argtypes = [p, p, n, n, p, n, p]
    lib.runs_extend.restype = lib.runs_find.restype = None


class _Text(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_int32) for name in ("shift", "oldest", "length", "entered", "longest", "depth")),
        *((name, ctypes.c_void_p) for name in ("tokens", "previous", "heads")),
    ]


class Compiled:
    """`Index` in C.  Its memory is that of numpy, which the system gives as it is written."""

    def __init__(self, lib: ctypes.CDLL, capacity: int, longest: int = 1, depth: int = 0) -> None:
        declare(lib)
        self.lib, self.capacity, self.width = lib, capacity, 2 + depth
        self.memory = np.zeros(capacity * (1 + len(RUNS)) + (len(RUNS) << width(capacity)), np.int32)
        at = self.memory.ctypes.data
        after = at + 4 * capacity, at + 4 * capacity * (1 + len(RUNS))
        self.text = _Text(32 - width(capacity), 0, 0, 0, longest, depth, at, *after)
        self.at = ctypes.addressof(self.text)
        self.found = [
            array("i", bytes(4 * (len(RUNS) + sum(PLACES) * self.width))) for _ in range(2)
        ]  # in itself, in others

    def __deepcopy__(self, memo: object) -> Compiled:
        made = Compiled(self.lib, self.capacity, self.text.longest, self.text.depth)
        made.memory[:] = self.memory
        made.text.oldest, made.text.length, made.text.entered = (
            self.text.oldest,
            self.text.length,
            self.text.entered,
        )
        return made

    @property
    def first(self) -> int:
        return int(self.text.oldest)

    @first.setter
    def first(self, place: int) -> None:
        self.text.oldest = place

    @property
    def length(self) -> int:
        return int(self.text.length)

    def _fits(self, tokens: Sequence[int]) -> None:
        assert self.length + len(tokens) <= self.capacity, (
            f"{self.length + len(tokens)} tokens in an index of {self.capacity}"
        )

    def extend(self, tokens: Sequence[int]) -> None:
        self._fits(tokens)
        given = array("i", tokens)  # named, so that it lives until C has read it
        self.lib.runs_extend(self.at, given.buffer_info()[0], len(given))

    def find(self, tokens: Sequence[int], said: Sequence[int], texts: Sequence[Compiled]) -> Places:
        self._fits(tokens)
        given, out, row = array("i", [*tokens, *said]), self.found[len(texts) > 0], self.width
        among = array("Q", [text.at for text in texts]) if texts else None
        self.lib.runs_find(
            self.at, given.buffer_info()[0], len(tokens), len(said), among.buffer_info()[0] if among else None, len(texts),
            out.buffer_info()[0],
        )  # fmt: skip

        def places(order: int) -> list[tuple[int, list[int]]]:
            begin = len(RUNS) + FRONT[order] * row
            rows, found = out[begin : begin + out[order] * row].tolist(), []
            for i in range(0, len(rows), row):
                found += [(rows[i + 1], rows[i + 2 : i + row])] * rows[i]
            return found

        return places
