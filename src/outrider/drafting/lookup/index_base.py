"""Index of the runs of a text: the interface, and the constants of its implementations."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

RUNS = (8, 4, 2, 1)  # tokens of a run, by its order; these constants are those of runs.c
PLACES = (
    4,
    16,
    16,
    16,
)  # most recent ones of a run that are looked at; after long ones the same follows, as a rule
FRONT = (0, 4, 20, 36)  # those of longer runs
Places = Callable[
    [int], list[tuple[int, list[int]]]
]  # order -> of each place how many tokens agree, and what followed


class Index(Protocol):
    """A text that grows up to `capacity` tokens, and where each run of it ended: 36 bytes a token, whatever the tokens are.

    The places of runs that share a hash are one list, most recent first; the tokens themselves are compared, at twice as many places as
    are wanted.  What the text ends with is not in the index before more follows: it never finds itself.  `longest` and `depth`,
    given when it is made, are for `find`.
    """

    capacity: int
    first: int  # places before this one are forgotten

    @property
    def length(self) -> int:
        """Tokens, so far."""

    def extend(self, tokens: Sequence[int]) -> None: ...

    def find(self, tokens: Sequence[int], said: Sequence[int], texts: Sequence[Any]) -> Places:
        """Extends the text; then, of each order, the most recent places (see PLACES) where its last tokens ended, with `said` behind them.

        Looked up in the text itself where there are no `texts`, otherwise in these, the last one first.  What agrees in more tokens
        than `longest`, or in a longer run, counts as agreeing in less.  `depth` tokens that followed: the text itself goes on with
        what it has said, as a loop would; the others end with -1, also from a token below 0 on.  Good until the next look-up of its kind.
        """


def width(capacity: int) -> int:
    """Bits of a hash: not more of them than tokens."""
    return max(capacity, 64).bit_length() - 1
