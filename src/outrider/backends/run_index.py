"""The run index: where the runs of a text ended, and what followed them.  The interface, and the reference in
Python.

A run is a piece of the text of 8, 4, 2 or 1 tokens.  A match of n tokens is found through the list of the
longest run <= n.  The order of a run is its index in RUNS.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

# These constants are also in runs.c.
RUNS = (8, 4, 2, 1)
# The number of most recent places of a run that are looked at, by order: what follows long runs varies least.
PLACES = (4, 16, 16, 16)
# The sum of PLACES of all lower orders.
FRONT = (0, 4, 20, 36)
FIRST, NEXT, WORD = 2654435769, 2246822507, 0xFFFFFFFF  # the polynomial hash of runs.c, modulo 2^32

Place = tuple[int, list[int]]  # number of tokens that agree there, and the tokens that followed


class Places(Protocol):
    """The places that a look-up found."""

    def of(self, order: int) -> list[Place]:
        """Those of the runs of one order, most recent first."""


class Index(Protocol):
    """A text that grows to at most `capacity` tokens, and the places where each of its runs ended.

    It takes 36 bytes a token.

    The places of runs that share a hash form one list, most recent first.  A look-up compares tokens at up to
    twice PLACES of them.  The text's last token is indexed only when more follows, so that the text never
    finds its own end.  `longest` and `depth` of the constructor are parameters of `find`.
    """

    capacity: int
    first: int  # places before this one are ignored

    @property
    def length(self) -> int:
        """Number of tokens so far."""

    def extend(self, tokens: Sequence[int]) -> None:
        """Append tokens to the text."""

    def find(self, tokens: Sequence[int], ahead: Sequence[int], texts: Sequence[Any]) -> Places:
        """Append `tokens`, then find the latest matches of the text's end followed by `ahead`, by order.

        The places are those of the text itself if `texts` is empty, otherwise those of `texts`, the last text
        first.  The number of agreeing tokens is capped at `longest` and at one less than the next longer run.

        Each place gives the `depth` tokens that followed it.  The text itself repeats from that place when it
        ends, as a loop would.  Other texts give -1 from their end, or from a negative token, on.  The result
        is overwritten by the next call with, or without, `texts`.
        """

    def longest_match(self, tokens: Sequence[int], texts: Sequence[Any]) -> int:
        """Append `tokens`, then return how many tokens of the text's end agree with the best of the latest
        places in `texts`, which may include the text itself: of `RUNS[0]` to `longest`, or 0.
        """


def hash_bits(capacity: int) -> int:
    """Bits of a hash: at most one value for every token."""
    return max(capacity, 64).bit_length() - 1


@dataclass(frozen=True)
class _Found:
    """The places of an index, or of other texts, where a context ended: looked up when asked for."""

    index: ReferenceIndex
    context: array[int]
    texts: Sequence[ReferenceIndex]

    def of(self, order: int) -> list[Place]:
        longest = self.index.longest
        cap = min(longest, RUNS[order - 1] - 1) if order else longest
        found: list[Place] = []
        for text in reversed(self.texts or [self.index]):
            for length, place in text.places(self.context, order, cap):
                found.append((length, text.after(place, self.index.depth, repeat=not self.texts)))
        return found[: PLACES[order]]


class ReferenceIndex:
    """`Index` in Python.

    heads[order][hash]: the last place where a run of this hash ended.  previous[order][place]: the one before
    it.  -1: none.
    """

    def __init__(self, capacity: int, longest: int = 1, depth: int = 0) -> None:
        bits = hash_bits(capacity)
        self.longest, self.depth = longest, depth
        self.capacity, self.length, self.first, self.shift = capacity, 0, 0, 32 - bits
        self.tokens = array("i")
        self.heads = [array("i", [-1]) * (1 << bits) for _ in RUNS]
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
        """Hashes of all runs, by order, then by their ends.  Those of the halves make that of a run."""
        halves, power = [token * FIRST & WORD for token in tokens], NEXT
        hashes = [[value >> self.shift for value in halves]]
        for run in reversed(RUNS[1:]):
            halves = [last + first * power & WORD for first, last in zip(halves, halves[run:])]
            hashes.insert(0, [value >> self.shift for value in halves])
            power = power * power & WORD
        return hashes

    def find(self, tokens: Sequence[int], ahead: Sequence[int], texts: Sequence[ReferenceIndex]) -> Places:
        self.extend(tokens)
        context = array("i", [*self.tokens[-self.longest :], *ahead][-self.longest :])
        return _Found(self, context, texts)

    def longest_match(self, tokens: Sequence[int], texts: Sequence[ReferenceIndex]) -> int:
        self.extend(tokens)
        context = self.tokens[-self.longest :]
        places = [text.places(context, 0, self.longest) for text in texts]
        return max([length for found in places for length, _ in found], default=0)

    def places(self, context: array[int], order: int, cap: int) -> list[tuple[int, int]]:
        """(number of agreeing tokens, at most `cap`; place) of the most recent places."""
        run = RUNS[order]
        found: list[tuple[int, int]] = []
        if len(context) < run:
            return []
        place = self.heads[order][self._hashes(context[-run:])[order][0]]
        for _ in range(2 * PLACES[order]):
            if place < self.first or len(found) == PLACES[order]:
                break
            length = self._agreement(context, place, cap)
            if length >= run:
                found.append((length, place))
            place = self.previous[order][place]
        return found

    def _agreement(self, context: array[int], place: int, cap: int) -> int:
        """How many tokens up to `place` equal the last ones of `context`."""
        cap = min(len(context), place + 1, cap)
        return next((back for back in range(cap) if self.tokens[place - back] != context[-1 - back]), cap)

    def after(self, place: int, depth: int, repeat: bool) -> list[int]:
        """The `depth` tokens after a place; at the end of the text the first ones again, or -1."""
        text = self.tokens[place + 1 : place + 1 + depth].tolist()
        if repeat:
            return [text[i % len(text)] for i in range(depth)]
        valid = next((i for i, token in enumerate(text) if token < 0), len(text))
        return text[:valid] + [-1] * (depth - valid)
