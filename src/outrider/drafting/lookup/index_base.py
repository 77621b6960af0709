"""Interface of the run index, and the constants of its implementations.

A run is a piece of the text of 8, 4, 2 or 1 tokens.  A match of n tokens is found through the list of the
longest run <= n.  The order of a run is its index in RUNS.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

# These constants are also in runs.c.
RUNS = (8, 4, 2, 1)
# The number of most recent places of a run that are looked at, by order: what follows long runs varies least.
PLACES = (4, 16, 16, 16)
# The sum of PLACES of all lower orders.
FRONT = (0, 4, 20, 36)

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


def hash_bits(capacity: int) -> int:
    """Bits of a hash: at most one value for every token."""
    return max(capacity, 64).bit_length() - 1
