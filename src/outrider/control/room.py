"""Room: what rows may still lose before plans are made again, and whether outcomes surprise."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from outrider.control.ledger import Ledger
from outrider.control.plan import Plan, Try
from outrider.core.step import Batch

SHORTFALL = 1.5  # times the root of the expected tokens: so many fewer, and steps are taken in at once


@dataclass
class Room:
    """Seconds that all rows, and each, may lose, as steps use them up.

    expected, shortfall: accepted tokens, and how many fewer there were, of the steps not taken in yet
    """

    of_all: float = 0.0
    of_row: dict[int, float] = field(default_factory=dict)
    expected: float = 0.0
    shortfall: float = 0.0

    def set(self, ledger: Ledger, plans: Mapping[int, Plan]) -> None:
        """Take what the ledgers have left.  plans: of rows, by their place in the batch."""
        self.of_all = ledger.room
        self.of_row = {r: plan.state.ledger.room for r, plan in plans.items()}

    def enter(self, batch: Batch, tries: Mapping[int, Try], token: float) -> bool:
        """Enter the drafts of a step.  Returns whether there is room for another such step.

        token: seconds of plain decoding that an accepted token saves.
        """
        most, enough = 0.0, True
        for r, tried in tries.items():
            right, plan = len(batch[r].accepted), tried.plan
            self.expected += tried.expected
            self.shortfall += tried.expected - right
            change, most = right * token - plan.loss, most + plan.loss
            self.of_all += change
            self.of_row[r] += change
            enough &= self.of_row[r] >= plan.loss
        return enough and self.of_all >= most

    @property
    def surprising(self) -> bool:
        """Whether far fewer tokens were accepted than expected."""
        return self.shortfall > SHORTFALL * math.sqrt(1 + self.expected)


def enter_losses(ledger: Ledger, tries: Iterable[Try], sign: int) -> None:
    """Enter what the drafts of a step in flight may lose, or with sign -1 take it back."""
    for tried in tries:
        for each in (tried.plan.state.ledger, ledger):
            each.loss += sign * tried.plan.loss
