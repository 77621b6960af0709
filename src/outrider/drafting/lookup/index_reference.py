"""`Index` of runs.py in Python: what runs.c does, where no C compiler is, and for the tests."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from outrider.drafting.lookup.index_base import PLACES, RUNS, Places, width

FIRST, NEXT, WORD = 2654435769, 2246822507, 0xFFFFFFFF  # the polynomial of runs.c


class Plain:
    """heads[order][hash] is the last place of such a run, previous[order][place] the one before it, -1 none."""

    def __init__(self, capacity: int, longest: int = 1, depth: int = 0) -> None:
        self.longest, self.depth = longest, depth
        self.capacity, self.length, self.first, self.shift = capacity, 0, 0, 32 - width(capacity)
        self.tokens = array("i")
        self.heads = [array("i", [-1]) * (1 << width(capacity)) for _ in RUNS]
        self.previous = [array("i") for _ in RUNS]

    def extend(self, tokens: Sequence[int]) -> None:
        self.tokens.extend(tokens)
        self.length = len(self.tokens)
        assert self.length <= self.capacity, f"{self.length} tokens in an index of {self.capacity}"
        start, end = len(self.previous[0]), self.length - 1
        before = max(0, start + 1 - RUNS[0])
        hashes = self._hashes(self.tokens[before:end])
        for run, heads, previous, keys in zip(RUNS, self.heads, self.previous, hashes):
            for place in range(start, end):
                if place < run - 1:
                    previous.append(-1)
                    continue
                key = keys[place - before - run + 1]
                previous.append(heads[key])
                heads[key] = place

    def _hashes(self, tokens: Sequence[int]) -> list[list[int]]:
        """Of each order those of all its runs, the one that ends first in front: a run is twice the next shorter one."""
        sums, power = [[token * FIRST & WORD for token in tokens]], NEXT
        for run in reversed(RUNS[1:]):
            sums.append([last + first * power & WORD for first, last in zip(sums[-1], sums[-1][run:])])
            power = power * power & WORD
        return [[value >> self.shift for value in values] for values in reversed(sums)]

    def find(self, tokens: Sequence[int], said: Sequence[int], texts: Sequence[Plain]) -> Places:
        longest, depth = self.longest, self.depth
        self.extend(tokens)
        context = array("i", [*self.tokens[-longest:], *said][-longest:])

        def places(order: int) -> list[tuple[int, list[int]]]:
            most = min(longest, RUNS[order - 1] - 1) if order else longest
            found = [
                (text, *place)
                for text in reversed(texts or [self])
                for place in text._places(context, order, most)
            ]
            return [
                (length, text._after(at, depth, not texts)) for text, length, at in found[: PLACES[order]]
            ]

        return places

    def _places(self, context: array[int], order: int, most: int) -> list[tuple[int, int]]:
        """How many tokens agree, and where."""
        run = RUNS[order]
        found: list[tuple[int, int]] = []
        if len(context) < run:
            return []
        at = self.heads[order][self._hashes(context[-run:])[order][0]]
        for _ in range(2 * PLACES[order]):
            if at < self.first or len(found) == PLACES[order]:
                break
            length = self._agreement(context, at, most)
            if length >= run:
                found.append((length, at))
            at = self.previous[order][at]
        return found

    def _agreement(self, context: array[int], at: int, most: int) -> int:
        """How many tokens up to place `at` are the last ones of `context`."""
        most = min(len(context), at + 1, most)
        return next((back for back in range(most) if self.tokens[at - back] != context[-1 - back]), most)

    def _after(self, at: int, depth: int, loops: bool) -> list[int]:
        text = self.tokens[at + 1 : at + 1 + depth].tolist()
        if loops:
            return [text[i % len(text)] for i in range(depth)]
        known = next((i for i, token in enumerate(text) if token < 0), len(text))
        return text[:known] + [-1] * (depth - known)
