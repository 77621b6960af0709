"""Room: what rows may still lose before plans are made again, and whether outcomes surprise."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from outrider.control.ledger import Ledger
from outrider.control.plan import Plan, Try
from outrider.core.row import Row
from outrider.core.step import Batch

SHORTFALL = 1.5  # times the root of the expected tokens: so many fewer, and steps are taken in at once


@dataclass
class Room:
    """Seconds that all rows, and each, may lose, as steps use them up.

    reserve: those that all may lose by drafts that surely pay, while there is no room
    Since plans were made:
    expected, shortfall: accepted tokens of the verified nodes, and how many fewer there were.
    planned, missing: the same by the plans, which also count drafts that were asked for in vain.
    """

    of_all: float = 0.0
    of_row: dict[Row, float] = field(default_factory=dict)
    reserve: float = 0.0
    expected: float = 0.0
    shortfall: float = 0.0
    planned: float = 0.0
    missing: float = 0.0

    def set(self, ledger: Ledger, plans: Mapping[Row, Plan]) -> None:
        """Take what the ledgers have left."""
        self.of_row, self.expected, self.shortfall = {}, 0.0, 0.0
        self.planned = self.missing = 0.0
        self.add(ledger, plans)

    def add(self, ledger: Ledger, plans: Mapping[Row, Plan]) -> None:
        """Take what the ledgers have left, beside the rows so far."""
        self.of_all, self.reserve = ledger.room, ledger.reserve
        for row, plan in plans.items():
            self.of_row[row] = plan.state.ledger.room

    def enter(self, batch: Batch, tries: Mapping[int, Try], token: float) -> bool:
        """Enter the drafts of a step.  Returns whether there is room for another such step.

        token: seconds of plain decoding that an accepted token saves.
        """
        most, enough, sure = 0.0, True, True
        for r, tried in tries.items():
            step, plan = batch[r], tried.plan
            right = len(step.accepted)
            self.expected += tried.expected
            self.shortfall += tried.expected - right
            planned = tried.planned
            self.planned += planned
            self.missing += planned - right
            change, most = right * token - plan.loss, most + plan.loss
            self.of_all += change
            self.reserve += change
            sure &= plan.sure
            left = self.of_row[step.row] = self.of_row[step.row] + change
            enough &= left >= plan.loss
        return enough and (self.of_all >= most or (sure and self.reserve > 0))

    @property
    def surprising(self) -> bool:
        """Whether far fewer tokens were accepted than expected."""
        fewer = self.shortfall > SHORTFALL * math.sqrt(1 + self.expected)
        return fewer or self.missing > SHORTFALL * math.sqrt(1 + self.planned)


def enter_losses(ledger: Ledger, tries: Iterable[Try], sign: int) -> None:
    """Enter what the drafts of a step in flight may lose, or with sign -1 take it back."""
    for tried in tries:
        for each in (tried.plan.state.ledger, ledger):
            each.loss += sign * tried.plan.loss
