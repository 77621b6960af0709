"""The adaptive controller: which drafters to ask, how deep, and which of their tokens to verify.

    budget      which drafters to ask, and how deep (planner.py); none: a plain step
    mix         a further drafter of a mix is asked if it pays beside what the cheaper ones propose (mix.py)
    trim        the nodes of the whole batch that pay, by calibrated probability (trim.py)
    learn       costs, acceptance, and the ledger that bounds what all of this may lose (evidence.py)

Plans hold for several steps, up to `DIGEST`, where planning takes longer than `PLANNING` of a step and the
ledgers have room for what the next step may lose; then the outcomes are taken in together.  Where a row
begins, ends or has tried a drafter, those of the others go on: a large batch changes every few steps.

While no row drafts, the controller rests (rest.py): it counts plain steps and decides nothing, whichever
requests come and go.  Which drafters prefill new requests is decided apart (prefill_choice.py).

No decision changes the text under the rule "match".  Under the other rules the distribution stays, but a seed
does not repeat the text, because budgets depend on the clock.
"""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Iterable
from typing import Any

from outrider.control.cost import OUTLIER
from outrider.control.evidence import LONGEST_PAUSE, Evidence
from outrider.control.fixed import FixedController
from outrider.control.mix import MixAsks
from outrider.control.outcomes import note_depths
from outrider.control.plan import Load, Plan, StepRecord, Try
from outrider.control.planner import USUAL, Planner, Settings
from outrider.control.prefill_choice import PrefillChoice
from outrider.control.report import report
from outrider.control.rest import Rest
from outrider.control.room import Room, enter_losses
from outrider.control.trim import keep_what_pays
from outrider.control.waits import closed, least_need
from outrider.core.clock import Times, one_time, take_one_time
from outrider.core.row import Row
from outrider.core.step import Batch, Commit, RowStep
from outrider.core.tree import NO_BUDGET, Budget

PLANNING = 0.005  # of a plain step: plans hold for several steps where making them takes more
# The same while drafters are new, which is when plans are made again soon, and the most steps of such a plan.
MOST_PLANNING, NEW_STEPS = 0.02, 4
LONG_PLAN = 5e-4  # seconds of a plan beyond OUTLIER times the average: it was interrupted
ANCHOR = 96  # steps with drafts after which a plain one measures its cost again


class AutoController:
    """Controller that chooses by measured cost and acceptance.

    limits: upper bounds, from options that were given.
    evidence: shared with the controllers of other rows, where several steps are in flight.  It has the arms:
    the drafters of a mix, or the only one.

    settles: whether `settle` is called in every step.  rest: the present one, if no drafter is considered.

    Of the plans:
    plans, considered: of rows; those for which the drafters were considered, until `stale`.
    load, rows: beside which they were made, and the rows of the last step.
    age, interval: steps since all of them were made, and steps that they hold for.
    room: what may be lost before they are made again.  due: `settle` has to make them again.
    look_seconds: moving average of making them and of taking in what led to them.
    looked, digested: seconds of both, the last time.

    Of this step:
    batch, tries: its rows, and the drafts of those that have a plan.
    anchored, guided: it stays plain to be measured; some row gets forced text.
    mix: asks, if there are several drafters.  began: one-time work before it.

    log: steps since the last digest.  since_plain: steps with drafts since the last plain one.
    cold: no step had drafts since the last rest.
    """

    def __init__(self, limits: FixedController, evidence: Evidence, settings: Settings = USUAL) -> None:
        self.limits, self.evidence, self.arms = limits, evidence, evidence.arms
        self.clock = settings.clock
        self.prefills = any(arm.prefills for arm in self.arms)
        self.planner = Planner(limits, evidence, settings)
        self.prefill_choice = PrefillChoice(self.planner)
        self.settles = False
        self.rest: Rest | None = None
        self.plans: dict[Row, Plan] = {}
        self.considered: set[Row] = set()
        self.load, self.rows = self.planner.load, list[Row]()
        self.stale, self.due, self.age, self.interval = True, False, 0, 1
        self.room = Room()
        self.looked = self.digested = self.look_seconds = 0.0
        self.batch, self.tries = Batch(), dict[int, Try]()
        self.anchored = self.guided = False
        self.mix: MixAsks | None = None
        self.began = (0, 0.0)
        self.log: list[StepRecord] = []
        self.since_plain, self.cold = 0, True

    def nodes(self, rows: int) -> int:
        """The largest number of draft nodes that one of so many rows may get."""
        return self.limits.nodes(rows)

    def likely(self, rows: int) -> int:
        """As many as the last plans allow."""
        return max([plan.budget.nodes for plan in self.plans.values()], default=0)

    # ---- before drafting

    def budget(self, batch: Batch) -> list[Budget]:
        self.batch, rest = batch, self.rest
        if rest is not None and (rest.repeats(batch) or self._rests(rest, batch)):
            return [NO_BUDGET] * len(batch)
        self.guided, self.tries, self.mix = False, {}, None
        self.began = one_time()
        if self.stale:
            self._look(batch)
            if not self.plans and self.load.batch:
                self._begin_rest()
                return [NO_BUDGET] * len(batch)
        else:
            self._look_at_new(batch)
        self.anchored = self._anchor()
        if self.anchored:
            return [NO_BUDGET] * len(batch)
        if len(self.arms) > 1 and self.plans:
            batch.mix_budgets = self.mix = MixAsks(self.planner, self.load, self.tries, self.clock)
        return [self._granted(r, step) for r, step in enumerate(batch)]

    def _granted(self, r: int, step: RowStep) -> Budget:
        plan = self.plans.get(step.row) if step.emits else None
        most = step.row.draft_depth if plan is not None else 0
        if plan is None or not most:
            return NO_BUDGET
        late = self.planner.late(plan, step.row) if plan.late else {}
        self.tries[r] = Try(plan, late=late)
        return plan.budget if plan.budget.depth <= most else plan.budget.within(most, self.limits.size(most))

    # ---- rests

    def _begin_rest(self) -> None:
        """Rest until the next drafter may be considered, for these rows and for new ones."""
        least = math.ceil(self.look_seconds / (self.load.explore * self.load.decode))
        new = max(least, wait) if (wait := closed(self.planner)) else 0
        longest = min(LONGEST_PAUSE, max(least, self.planner.wait, 1))
        count = len(self.rows)
        depth, need = self.limits.depth_for(count), least_need(self.planner)
        self.rest = Rest(self.planner, self.load, longest - 1, new, need, depth, count)
        self.anchored, self.since_plain = False, 0
        self._charge(self.looked)
        self.looked = 0.0

    def _charge(self, seconds: float) -> None:
        """Enter seconds of the controller's own work.  What an interruption adds is the machine's."""
        self.evidence.host += min(seconds, OUTLIER * self.look_seconds + LONG_PLAN)

    def _rests(self, rest: Rest, batch: Batch) -> bool:
        """Whether a rest goes on in a step in which something has to be looked at."""
        if rest.goes_on(batch, self.look_seconds):
            if batch.prefill:
                self.prefill_choice.leave_out(batch)
            return True
        rest.settle()
        self.rest, self.load, self.stale, self.cold = None, rest.load, True, True
        return False

    def _anchor(self) -> bool:
        """Whether a plain step, without prompt tokens, is due to measure its cost again."""
        seen = self.evidence.forward.plain_steps[self.load.batch]
        longest = min(ANCHOR, 4 << min(5, seen)) if seen else 0
        due = self.since_plain >= longest or self.evidence.surprises >= 4
        return not self.load.batch or (due and self.load.decodes_only)

    def forced(self, r: int) -> bool:
        """Whether row r may get forced text: not in a plain step.  Its drafters are not asked then."""
        if self.rest is not None and not self.guided:
            self.began = one_time()
        self.guided = True
        self.tries.pop(r, None)
        return not self.anchored

    def _look(self, batch: Batch) -> None:
        """Plan the next steps of all rows."""
        if self.log:
            self._digest()
        began = self.clock()
        self._take_rows(batch)
        self.considered.clear()
        self.evidence.refresh()
        self.plans = self.planner.plans(batch, self.load)
        self._mark_considered(batch)
        self.looked, self.stale, self.due, self.age = self.clock() - began, False, False, 0
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
        changed = batch.prefill or not self.load.decodes_only or batch.rows != self.rows
        if changed:
            self._take_rows(batch)
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

    def _take_rows(self, batch: Batch) -> None:
        """Take the rows of a batch, which have changed, or have or had prompt tokens."""
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
        return max(1, least, min(often, self.planner.interval(self.plans.values())))

    # ---- while drafting

    def trim(self, batch: Batch) -> None:
        """Keep the nodes of the whole batch that pay, and one of each plan that tests its drafters."""
        if self.rest is not None:
            if self.guided:
                self.limits.trim(batch)
            return
        if self.mix is not None:
            self.mix.stop_clock()
        if any(step.tree.tokens for step in batch):
            self.limits.trim(batch)
        for r, tried in self.tries.items():
            step = batch[r]
            if len(self.arms) == 1:  # now that the scheduler has cut the budgets
                tried.asked = {0: step.budget.depth} if step.budget.depth else {}
            if step.tree.tokens:
                note_depths(tried, step, self.evidence.bits)
            if self.prefills and (tried.late or len(tried.proposed) < len(tried.asked)):
                tried.catch_up(step.row, self.arms)
        keep_what_pays(batch, self.tries, self.load)

    # ---- after the step

    def learn(self, commit: Commit, times: Times) -> None:
        batch, rest = commit.batch, self.rest
        ended = [step.row for step in batch if step.row.finish_reason is not None]
        if rest is None:
            self._note(batch, times, bool(ended), take_one_time(self.began))
        elif self.guided or (batch.prefill and self.prefill_choice.computes(batch)):
            # at once: forced drafts of a row that ends, and what a first prefill costs
            at_once = self.guided or self.prefill_choice.tells_cost(batch)
            rest.add_record(batch, times, take_one_time(self.began), at_once)
            self.guided = False
        else:
            rest.add(batch, times)
        if ended:
            if rest is not None and len(ended) == len(batch):
                rest.settle()
            load = self.load if rest is None else rest.load
            self.evidence.finish(ended, batch, load)
            self.evidence.save(time.perf_counter())
            self._drop_plans(ended)
            self.rows, self.tries = [], {}

    def _note(self, batch: Batch, times: Times, ended: bool, once: float) -> None:
        """Log a step, and take in the log if it is due."""
        seconds = times.forward + times.rest - self.looked
        self._charge(self.looked)
        self.looked = 0.0
        spent = self.mix.seconds if self.mix is not None else {}
        what = batch, self.load, self.tries, times.propose, seconds, spent, ended
        self.log.append(StepRecord(*what, once, self.cold and bool(self.tries)))
        self.cold = self.cold and not self.tries
        if any(step.tree.tokens for step in batch):
            self.since_plain += 1
        elif self.load.batch:
            self.since_plain = 0
        room = self.room.enter(batch, self.tries, self.load.accepted_token)
        self.age += 1
        if self.room.surprising or not room or not (self.tries or self.anchored):
            self.stale = True
        elif self.age >= self.interval:
            self.due, self.stale = self.settles, not self.settles
        tried = [batch[r].row for r, tried in self.tries.items() if tried.plan.exploring]
        if tried or ended or self.anchored or self.stale:
            self._digest()
            self._drop_plans(tried)

    def settle(self) -> None:
        """Take in the log if it is due, and plan, while a device computes the next step with its old plans.

        That step takes longer, as a rule, and hides it: its time is no loss.
        """
        if self.due:
            tries, ledger = self.tries, self.evidence.ledger
            going = {self.batch[r].row: tried.plan for r, tried in tries.items()}
            enter_losses(ledger, tries.values(), 1)
            self._look(self.batch)
            enter_losses(ledger, tries.values(), -1)
            self.room.set(ledger, {**going, **self.plans})
            self.evidence.host = self.looked = 0.0  # what was charged before is in the ledger now
            self.stale = not self.plans  # then a rest may begin

    def _digest(self) -> None:
        began = self.clock()
        self.evidence.learn(self.log)
        self.log = []
        self.digested = self.clock() - began
        self._charge(self.digested)

    def shared(self, rows: Collection[Row]) -> int:
        """How many of these rows were in its last step."""
        return len(set(rows).intersection(self.batch.rows))

    def release(self, rows: Collection[Row]) -> None:
        """Take in the steps so far, if they have rows of these: another controller gets them."""
        if self.log and self.shared(rows):
            self._digest()
            self.evidence.refresh(rows)
        self._drop_plans(rows)
        if self.rest is not None and self.shared(rows):
            self.rest.settle()

    def report(self) -> dict[str, Any]:
        """What was chosen and why (report.py)."""
        load = self.load if self.rest is None else self.rest.load
        return report(self.evidence, self.planner, load, self.rest is not None)
