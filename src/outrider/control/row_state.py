"""What the adaptive controller knows of one request."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from outrider.control.acceptance import Calibration, Reach
from outrider.control.ledger import Ledger
from outrider.core.row import NO_DRAFTS, Drafted, DraftingSummary


@dataclass(slots=True)
class RowArm:
    """What is known of a drafter in one request.

    retry: step from which it may be tried although it does not seem to pay.
    earned: seconds that its drafts have saved.
    grade: of its next draft, at the last look.
    """

    reach: Reach
    retry: int = 0
    earned: float = 0.0
    grade: int = 0


@dataclass(slots=True)
class RowState:
    """What is known of one request.

    asleep: no drafter is considered before this step, unless far fewer rows run than the `crowd` of then.
    steps: those that ledger and summary have.
    """

    calibration: Calibration
    arms: Sequence[RowArm]
    ledger: Ledger
    summary: DraftingSummary
    asleep: int = 0
    crowd: int = 0
    steps: int = 0

    def promising(self, grades: Sequence[int]) -> bool:
        """Whether some grade is better than at the last look.  The row sleeps no more then."""
        found = False
        for arm, grade in zip(self.arms, grades):
            found |= grade > arm.grade
            arm.grade = grade
        if found:
            self.asleep = 0
        return found

    def enter(
        self,
        arm: str,
        spent: float,
        plain: float,
        steps: int = 1,
        drafted: Drafted = NO_DRAFTS,
        idle: float = 0.0,
    ) -> None:
        """Add steps to ledger and summary.

        spent, plain, steps, drafted: as in `DraftingSummary.add`.
        idle: seconds that drafters took although none was asked.  No decision changes them, so no ledger
        has them, but the summary does.
        """
        self.steps += steps
        self.ledger.add(spent, plain)
        self.summary.add(arm, spent + idle, plain, steps, drafted)
