"""The adaptive controller: which drafters to ask, how deep, and which of their tokens to verify.

    budget      which drafters to ask, and how deep (planner.py); none: a plain step
    mix         a further drafter of a mix is asked if it pays beside what the cheaper ones propose (mix.py)
    trim        the nodes of the whole batch that pay, by calibrated probability (trim.py)
    learn       costs, acceptance, and the ledger that bounds what all of this may lose (evidence.py)

Plans hold for several steps (standing.py).  While no row drafts, the controller rests (rest.py): it counts
plain steps and decides nothing, whichever requests come and go.  Which drafters prefill new requests is
decided apart (prefill_choice.py).

No decision changes the text under the rule "match".  Under the other rules the distribution stays, but a seed
does not repeat the text, because budgets depend on the clock.
"""

from __future__ import annotations

import math
import time
from collections.abc import Collection
from typing import Any

from outrider.control.evidence import LONGEST_PAUSE, Evidence
from outrider.control.fixed import FixedController
from outrider.control.mix import MixAsks
from outrider.control.outcomes import note_depths
from outrider.control.plan import Load, StepRecord, Try
from outrider.control.planner import USUAL, Settings
from outrider.control.report import report
from outrider.control.rest import Rest
from outrider.control.room import enter_losses
from outrider.control.standing import StandingPlans
from outrider.control.trim import keep_what_pays
from outrider.control.waits import closed, least_need
from outrider.core.clock import Times, one_time, take_one_time
from outrider.core.row import Row
from outrider.core.step import Batch, Commit, RowStep
from outrider.core.tree import NO_BUDGET, Budget

ANCHOR = 96  # steps with drafts after which a plain one measures its cost again


class AutoController(StandingPlans):
    """Controller that chooses by measured cost and acceptance.

    limits: upper bounds, from options that were given.
    evidence: shared with the controllers of other rows, where several steps are in flight.  It has the arms:
    the drafters of a mix, or the only one.

    settles: whether `settle` is called in every step, where all plans are made then.  due: it has to.
    rest: the present one, if no drafter is considered.

    Of this step:
    batch, tries: its rows, and the drafts of those that have a plan.
    anchored, guided: it stays plain to be measured; some row gets forced text.
    mix: asks, if there are several drafters.  began: one-time work before it.

    ended: rows to be completed, and steps and loads in which they ended.
    since_plain: steps with drafts since the last plain one.  cold: no step had drafts since the last rest.
    """

    def __init__(self, limits: FixedController, evidence: Evidence, settings: Settings = USUAL) -> None:
        super().__init__(limits, evidence, settings)
        self.limits, self.arms = limits, evidence.arms
        self.prefills = any(arm.prefills for arm in self.arms)
        self.settles = self.due = False
        self.rest: Rest | None = None
        self.batch, self.tries = Batch(), dict[int, Try]()
        self.anchored = self.guided = False
        self.mix: MixAsks | None = None
        self.began = (0, 0.0)
        self.ended: list[tuple[list[Row], Batch, Load]] = []
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
        if self.settles:
            self._follow(batch)
        elif self.vain:  # the last trial has failed
            self._take_changed(batch)
        elif rest is not None and rest.promising:
            self._look_at_promising(batch, rest)
        elif self.stale:
            self._look(batch)
        else:
            self._look_at_new(batch)
        if self.vain and self.load.batch:
            self._begin_rest()
            return [NO_BUDGET] * len(batch)
        self.anchored = self._anchor()
        if self.anchored or self.stale:
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
        self._charge(self.looked)
        # what drafts that have paid took is no work for a rest to make up for
        worked = min(self.worked, 2 * self.look_seconds)
        least = math.ceil(worked / (self.load.explore * self.load.decode))
        wait, count = closed(self.planner), len(self.rows)
        self.rest = Rest(
            self.planner,
            self.load,
            longest=min(LONGEST_PAUSE, max(least, self.planner.wait, 1)) - 1,
            closed=max(least, wait) if wait else 0,
            need=least_need(self.planner),
            depth=self.limits.depth_for(count),
            rows=count,
            clock=self.clock,
        )
        self.anchored = self.vain = self.due = False
        self.since_plain = 0
        self.looked = self.worked = 0.0

    def _rests(self, rest: Rest, batch: Batch) -> bool:
        """Whether a rest goes on in a step in which something has to be looked at."""
        if rest.goes_on(batch, self.look_seconds):
            if batch.prefill:
                self.prefill_choice.leave_out(batch)
            return True
        rest.settle()
        self.rest, self.load, self.stale, self.cold = None, rest.load, True, True
        return False

    def _look_at_promising(self, batch: Batch, rest: Rest) -> None:
        """Plan for the rows that have ended a rest; the others are considered when it would have ended."""
        self._look(batch, [step for step in batch if step.row in rest.promising])
        self.planner.wait = min(self.planner.wait, max(1, rest.longest - rest.taken))

    def _anchor(self) -> bool:
        """Whether a plain step, without prompt tokens, is due to measure its cost again."""
        seen = self.evidence.forward.plain_near(self.load.batch)
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

    def _follow(self, batch: Batch) -> None:
        """Go on with the plans so far, while they hold: others are made while the device computes."""
        self._take_changed(batch)
        self.vain = self.vain and self.load.batch > 0  # the rows that no plan was made for may have ended
        self.due |= self.stale or any(step.emits and step.row not in self.considered for step in batch)

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
            self.ended.append((ended, batch, self.load if rest is None else rest.load))
            self.evidence.pending = True
            self._drop_plans(ended)
            self.rows, self.tries = [], {}
            if not self.settles:
                self._finish()

    def _finish(self) -> None:
        """Complete what is known of rows that have ended."""
        if self.log:
            self._digest()
        for ended, batch, load in self.ended:
            self.evidence.finish(ended, batch, load)
        self.evidence.save(time.perf_counter())
        self.ended, self.evidence.pending = [], False

    def _note(self, batch: Batch, times: Times, ended: bool, once: float) -> None:
        """Log a step, and take in the log if it is due."""
        seconds = times.forward + times.rest - self.looked
        self._charge(self.looked)
        self.looked = 0.0
        spent = self.mix.seconds if self.mix is not None else {}
        cold = self.cold and bool(self.tries)
        self.log.append(
            StepRecord(batch, self.load, self.tries, times.propose, seconds, spent, ended, once, cold)
        )
        self.cold = self.cold and not self.tries
        if any(step.tree.tokens for step in batch):
            self.since_plain += 1
        elif self.load.batch:
            self.since_plain = 0
        room = self.room.enter(batch, self.tries, self.load.accepted_token)
        self.age += 1
        waits = self.settles and bool(self.plans)  # of this step there were none yet
        if self.room.surprising or not room or not (self.tries or self.anchored or waits):
            self.stale = True
        elif self.age >= self.interval:
            self.due, self.stale = self.settles, not self.settles
        tried = [batch[r].row for r, tried in self.tries.items() if tried.plan.exploring]
        if tried or self.anchored or self.stale:
            self.due |= self.settles
            if not self.settles:
                self._digest()
            self._drop_plans(tried)
            last = tried and not (self.settles or self.plans or ended)
            if last and not any(step.accepted for step in batch):
                self._end_trials()

    def _end_trials(self) -> None:
        """Begin a rest after trials that have shown nothing, unless another one is due: a look at all rows
        would be in vain.
        """
        planner = self.planner
        for estimates in (planner.options, planner.cautious):  # they do not count these trials
            estimates.clear()
        wait = closed(planner)
        planner.wait, self.vain = min(planner.wait, wait), wait > 0

    def settle(self, computes: bool = True) -> None:
        """Take in what is due, and plan, while a device computes the next step with its old plans.

        computes: it does; otherwise only what is known of rows that have ended is completed.

        That step takes longer, as a rule, and hides it: its time is no loss.
        """
        if self.ended:
            self._finish()
        if self.due and computes:
            tries, ledger = self.tries, self.evidence.ledger
            going = {self.batch[r].row: tried.plan for r, tried in tries.items()}
            enter_losses(ledger, tries.values(), 1)
            if self.log:
                self._digest()
            if self.stale or self.age >= self.interval:
                self._look(self.batch)
            else:
                self._look_at_new(self.batch)
            enter_losses(ledger, tries.values(), -1)
            self.room.set(ledger, {**going, **self.plans})
            self.due = False
        if computes:
            self.evidence.host = self.looked = 0.0

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
