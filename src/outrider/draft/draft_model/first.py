"""The first forward of a step of a draft model, which catches up with committed tokens."""

from __future__ import annotations

from dataclasses import dataclass, field

from outrider.cache.catch_up import TokenCursor
from outrider.core.row import Row
from outrider.core.step_input import StepInput
from outrider.core.tree import Budget
from outrider.drafting.view import NO_VIEW, View


@dataclass(slots=True, eq=False)
class Part:
    """Part of a row in the first forward: it has K/V of `done` tokens and lacks that of the next `missing`.

    r: its number in the batch.  budget: of its draft.  cursor: its progress; None if the target is its own
    draft.
    at: row of the forward after which the draft starts.  view: the slots that it attends to.  Both are set
    for rows that are drafted for.
    """

    row: Row
    r: int
    done: int
    missing: int
    budget: Budget
    cursor: TokenCursor | None
    at: int = -1
    view: View = NO_VIEW

    @property
    def end(self) -> int:
        """Position of its first draft token, once nothing is missing."""
        return self.done + self.missing


@dataclass(slots=True, eq=False)
class FirstForward:
    """The forward that catches up with committed tokens.

    starts: the rows to draft for.  reached: the cursors of all rows, and the number of their positions with
    K/V once the forward is done.
    """

    step_input: StepInput
    starts: list[Part] = field(default_factory=list)
    reached: list[tuple[TokenCursor, int]] = field(default_factory=list)
