"""The run index by runs.c."""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Sequence

import numpy as np

from outrider.backends.cpu.bindings import STRUCTS
from outrider.backends.run_index import FRONT, PLACES, RUNS, Place, Places, hash_bits


class Found:
    """The places that the last look-up found, in its result buffer: numbers, which C writes.

        number of rows [len(RUNS)] │ rows [sum(PLACES), 2 + depth]

    A row holds a number of equal places, how many tokens agree there, and the tokens that followed.
    """

    def __init__(self, depth: int) -> None:
        self.row_size = 2 + depth
        self.numbers = array("i", bytes(4 * (len(RUNS) + sum(PLACES) * self.row_size)))

    def of(self, order: int) -> list[Place]:
        first = len(RUNS) + FRONT[order] * self.row_size
        places: list[Place] = []
        for at in range(first, first + self.numbers[order] * self.row_size, self.row_size):
            count, length, *followed = self.numbers[at : at + self.row_size]
            places += [(length, followed)] * count
        return places


class CompiledIndex:
    """`Index` in C.

    One int32 array holds everything; untouched parts of it take no physical memory:

        tokens [capacity] │ previous [len(RUNS), capacity] │ heads [len(RUNS), 2^hash_bits]
    """

    def __init__(self, lib: ctypes.CDLL, capacity: int, longest: int = 1, depth: int = 0) -> None:
        self.lib, self.capacity = lib, capacity
        bits, orders = hash_bits(capacity), len(RUNS)
        self.memory = np.zeros(capacity * (1 + orders) + (orders << bits), np.int32)
        tokens = self.memory.ctypes.data
        previous, heads = tokens + 4 * capacity, tokens + 4 * capacity * (1 + orders)
        self.text = STRUCTS["TextIndex"](32 - bits, 0, 0, 0, longest, depth, tokens, previous, heads)
        self.address = ctypes.addressof(self.text)
        self.found_here, self.found_elsewhere = Found(depth), Found(depth)

    def __deepcopy__(self, memo: object) -> CompiledIndex:
        copied = CompiledIndex(self.lib, self.capacity, self.text.max_match, self.text.depth)
        copied.memory[:] = self.memory
        for name in ("oldest", "length", "entered"):
            setattr(copied.text, name, getattr(self.text, name))
        return copied

    @property
    def first(self) -> int:
        return int(self.text.oldest)

    @first.setter
    def first(self, place: int) -> None:
        self.text.oldest = place

    @property
    def length(self) -> int:
        return int(self.text.length)

    def _check_room(self, tokens: Sequence[int]) -> None:
        length = self.length + len(tokens)
        assert length <= self.capacity, f"{length} tokens in an index of {self.capacity}"

    def extend(self, tokens: Sequence[int]) -> None:
        self._check_room(tokens)
        buffer = array("i", tokens)  # must stay alive during the call
        self.lib.runs_extend(self.text, buffer.buffer_info()[0], len(buffer))

    def longest_match(self, tokens: Sequence[int], texts: Sequence[CompiledIndex]) -> int:
        self._check_room(tokens)
        given = array("i", tokens)  # these arrays must stay alive during the call
        others = array("Q", [text.address for text in texts])
        at = given.buffer_info()[0], len(given), others.buffer_info()[0]
        return int(self.lib.runs_longest(self.text, *at, len(texts)))

    def find(self, tokens: Sequence[int], ahead: Sequence[int], texts: Sequence[CompiledIndex]) -> Places:
        self._check_room(tokens)
        given = array("i", [*tokens, *ahead])  # these arrays must stay alive during the call
        others = array("Q", [text.address for text in texts])
        found = self.found_elsewhere if texts else self.found_here
        others_at = others.buffer_info()[0] if texts else None
        counts = len(tokens), len(ahead)
        self.lib.runs_find(
            self.text, given.buffer_info()[0], *counts, others_at, len(texts), found.numbers.buffer_info()[0]
        )
        return found
