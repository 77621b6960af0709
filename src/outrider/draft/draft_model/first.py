"""The first forward of a step of a draft model, which catches up with committed tokens."""

from __future__ import annotations

from typing import NamedTuple

from outrider.cache.catch_up import TokenCursor
from outrider.core.step_input import StepInput
from outrider.core.tree import Budget
from outrider.drafting.view import View


class Start(NamedTuple):
    """Start of the draft of batch row r: after row `at` of the first forward."""

    r: int
    budget: Budget
    at: int
    view: View


class Lag(NamedTuple):
    """Batch row r has K/V of `done` tokens and lacks that of the next `missing`.

    budget: of its draft.  cursor: its progress; None if the target is its own draft.
    """

    missing: int
    r: int
    done: int
    budget: Budget
    cursor: TokenCursor | None


class FirstForward(NamedTuple):
    """The forward that catches up with committed tokens.

    starts: the rows to draft for.  reached: the cursors of all rows, and the number of their positions with
    K/V once the forward is done.
    """

    step_input: StepInput
    starts: list[Start]
    reached: list[tuple[TokenCursor, int]]
