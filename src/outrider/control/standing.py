"""The plans of all rows under the adaptive controller, and when they are made again.

Plans hold for several steps, up to `DIGEST`, where planning takes longer than `PLANNING` of a step and the
ledgers have room for what the next step may lose; then the outcomes are taken in together.  Where a row
begins, ends or has tried a drafter, those of the others go on: a large batch changes every few steps.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from outrider.control.cost import OUTLIER
from outrider.control.evidence import Evidence
from outrider.control.fixed import FixedController
from outrider.control.plan import Load, Plan, StepRecord
from outrider.control.planner import DIGEST, Planner, Settings
from outrider.control.prefill_choice import PrefillChoice
from outrider.control.room import Room
from outrider.core.row import Row
from outrider.core.step import Batch, RowStep

PLANNING = 0.005  # of a plain step: plans hold for several steps where making them takes more
# The same while drafters are new, which is when plans are made again soon, and the most steps of such a plan.
MOST_PLANNING, NEW_STEPS = 0.02, 4
LONG_PLAN = 5e-4  # seconds of a plan beyond OUTLIER times the average: it was interrupted


class StandingPlans:
    """Plans, and the steps since they were made.

    plans, considered: of rows; those for which the drafters were considered, until `stale`.
    load, rows: beside which they were made, and the rows of the last step.
    vain: none was made, so that a rest begins.
    age, interval: steps since all of them were made, and steps that they hold for.
    room: what may be lost before they are made again.
    look_seconds: moving average of making them and of taking in what led to them.
    looked, digested: seconds of both, the last time.  worked: all of them since the last rest began.
    log: steps since the last digest.
    """

    def __init__(self, limits: FixedController, evidence: Evidence, settings: Settings) -> None:
        self.evidence, self.clock = evidence, settings.clock
        self.planner = Planner(limits, evidence, settings)
        self.prefill_choice = PrefillChoice(self.planner)
        self.plans: dict[Row, Plan] = {}
        self.considered: set[Row] = set()
        self.load, self.rows = self.planner.load, list[Row]()
        self.stale, self.vain, self.age, self.interval = True, False, 0, 1
        self.room = Room()
        self.looked = self.digested = self.look_seconds = self.worked = 0.0
        self.log: list[StepRecord] = []

    def _look(self, batch: Batch, steps: Sequence[RowStep] | None = None) -> None:
        """Plan the next steps of all rows, or of the rows of these steps: the others stay without drafts."""
        if self.log:
            self._digest()
        began = self.clock()
        self._take_rows(batch)
        self.considered.clear()
        self.evidence.refresh()
        self.plans = self.planner.plans(batch, self.load, steps)
        self._mark_considered(batch)
        self.vain = not self.plans and self.load.batch > 0  # a chunk of a prompt emits nothing
        self.looked, self.stale, self.age = self.clock() - began, False, 0
        took = min(self.looked + self.digested, OUTLIER * self.look_seconds + LONG_PLAN)
        self.look_seconds += 0.1 * (took - self.look_seconds)
        self.digested = 0.0
        self.interval = self._steps_of_plans(took)
        self.room.set(self.evidence.ledger, self.plans)

    def _look_at_new(self, batch: Batch) -> None:
        """Plan for rows that were not considered yet, or have tried a drafter; the plans of others go on."""
        new = [step for step in batch if step.emits and step.row not in self.considered]
        if new and self.log:
            self._digest()
        began = self.clock()
        changed = self._take_changed(batch)
        if new:
            rows = [step.row for step in new]
            self._drop_plans(rows)
            self.evidence.refresh(rows)
            plans = self.planner.plans(batch, self.load, new, [*self.plans.values()])
            self.plans.update(plans)
            self._mark_considered(new)
            self.room.add(self.evidence.ledger, plans)
        if new or changed:
            self.stale = not self.plans
            self.looked = self.clock() - began

    def _mark_considered(self, steps: Iterable[RowStep]) -> None:
        """Rows are considered again after the end of their prompt, when it is known what drafters lack."""
        self.considered.update([step.row for step in steps if step.emits and step.known == 1])

    def _take_changed(self, batch: Batch) -> bool:
        """Take the rows of a batch if they have changed, or have or had prompt tokens.  Returns whether."""
        changed = batch.prefill or not self.load.decodes_only or batch.rows != self.rows
        if changed:
            self._take_rows(batch)
        return changed

    def _take_rows(self, batch: Batch) -> None:
        self.prefill_choice.leave_out(batch)
        self.load, self.rows = Load.of(batch, self.evidence.forward, self.evidence.tail), batch.rows
        if gone := (self.considered | self.plans.keys()).difference(batch.rows):  # preempted, or aborted
            self._drop_plans(gone)

    def _drop_plans(self, rows: Iterable[Row]) -> None:
        """Drop what was planned for rows, which have ended or have to be considered again."""
        for row in rows:
            self.plans.pop(row, None)
            self.considered.discard(row)
        self.stale |= not self.plans

    def _steps_of_plans(self, took: float) -> int:
        """Steps that the plans hold for.  took: seconds of making them and of taking in what led to them."""
        often = math.ceil(self.look_seconds / (PLANNING * self.load.plain))
        least = min(NEW_STEPS, math.ceil(took / (MOST_PLANNING * self.load.plain)))
        return max(1, least, min(often, self._longest_interval()))

    def _longest_interval(self) -> int:
        """The same while losses leave room: few while drafters are new."""
        longest, most = DIGEST, DIGEST * self.load.batch  # many rows lose little by a few of them
        for plan in self.plans.values():
            for own in [plan.state.arms[option.drafter].reach for option in plan.options]:
                others = own.above.asked if own.above else 0
                longest = min(longest, 1 + (own.asked + min(others, most)) // 4)
        return longest

    def _digest(self) -> None:
        began = self.clock()
        self.evidence.learn(self.log)
        self.log = []
        self.digested = self.clock() - began
        self._charge(self.digested)

    def _charge(self, seconds: float) -> None:
        """Enter seconds of the controller's own work.  What an interruption adds is the machine's."""
        charged = min(seconds, OUTLIER * self.look_seconds + LONG_PLAN)
        self.evidence.host += charged
        self.worked += charged
