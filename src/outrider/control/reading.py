"""Which drafters compute the prompts of new requests: some have a model of their own that has to.

A prompt is a bet, as its cost comes before anything is known of the request.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from outrider.control.evidence import KNOWN, MOST_LOST
from outrider.control.ledger import EXPLORE
from outrider.control.plan import Arm, Load
from outrider.control.planner import Planner
from outrider.core.row import Row
from outrider.core.step import Batch, RowStep

FORGET = 0.98  # of a prefill cost, whenever a row leaves a drafter out
HOPE = 1.0  # standard deviations above the estimates for a drafter whose prefill has to pay
BET = 0.5  # part of what may be lost that prompts may take which are not expected to pay


class Outlook(NamedTuple):
    """What a drafter is expected to do beside so many requests.

    asked, steps: asks and steps with drafts that this comes from.  hopeful: it would pay if all its tokens
    were accepted.  expected, hoped: seconds that it saves for each token of the output.
    """

    asked: float
    steps: int
    hopeful: bool
    expected: float
    hoped: float


class Reading:
    """drafters: those that compute prompts, and draft under a name of their own.

    outlooks: by drafter, requests and depth.
    """

    def __init__(self, planner: Planner, arms: Sequence[Arm]) -> None:
        names = [arm.sources for arm in arms]
        self.planner, self.arms = planner, arms
        self.drafters = [k for k, arm in enumerate(arms) if arm.prefills and names.count(arm.sources) == 1]
        self.outlooks: dict[tuple[int, int, int], Outlook] = {}

    def leave_out(self, batch: Batch) -> None:
        """Spare new rows the drafters that are not expected to earn what their prefill costs, or did not
        earn it in several requests.

        Each is given a chance so rare that prefill in vain takes `EXPLORE` of the time, unless no acceptance
        would pay.  What nothing but hope or chance speaks for is taken from what may be lost.
        """
        if not self.drafters:
            return
        rows = [step.row for step in batch if _is_new(step) and step.row.params.speculate]
        most = self.planner.limits.depth_for(len(batch))
        if not rows or not most:
            return
        load = Load.plain_step(self.planner.evidence.forward, len(batch))
        self.planner.set_grace(load)
        for k in self.drafters:
            outlook = self._outlook(k, load, most)
            if outlook.hopeful:
                self._read(k, rows, load, outlook)
            else:
                _leave(rows, self.arms[k])

    def _outlook(self, k: int, load: Load, most: int) -> Outlook:
        planner, key = self.planner, (k, load.batch, most)
        reach, steps = planner.evidence.reach[k], planner.evidence.forward.steps
        found = self.outlooks.get(key)
        if found is None or (found.asked, found.steps) != (reach.asked, steps):
            planner.hopes.clear()  # the load is another one
            hopeful = planner.hopeful(k, load, most)
            expected, hoped = (
                planner.saved(planner.best(k, reach, z, load, most), load) for z in (0.0, HOPE)
            )
            found = self.outlooks[key] = Outlook(reach.asked, steps, hopeful, expected, hoped)
        return found

    def _read(self, k: int, rows: Sequence[Row], load: Load, outlook: Outlook) -> None:
        """Decide for each row whether drafter k reads its prompt."""
        evidence, draw = self.planner.evidence, self.planner.random.random
        room, cost_known = BET * evidence.ledger.room, evidence.prefill_cost[k] > 0
        for row in rows:
            cost = evidence.prefill_cost[k] * (len(row.tokens) - row.computed)
            by_chance = draw() * cost <= EXPLORE * row.remaining * load.token
            worthy = evidence.worth[k] >= -MOST_LOST * (cost + load.token)
            reads = by_chance or (worthy and outlook.hoped * row.remaining >= cost)
            is_bet = not worthy or outlook.asked < KNOWN or outlook.expected * row.remaining < cost
            affordable = cost <= room if cost_known else row is rows[0]
            if not reads:
                evidence.prefill_cost[k] *= FORGET  # not measured any more, it may be wrong
            if not reads or (is_bet and not affordable):
                _leave([row], self.arms[k])
            elif is_bet:
                room -= cost
                evidence.ledger.add(cost, 0.0)


def _leave(rows: Sequence[Row], arm: Arm) -> None:
    for row in rows:
        row.left_out |= frozenset(arm.sources)


def _is_new(step: RowStep) -> bool:
    """Whether this is the first step of its row."""
    return not step.row.steps and step.start == (step.row.cached or 0)
