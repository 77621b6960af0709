"""Which drafters compute the prompts of new requests: some have a model of their own that has to.

A prompt is a bet, as its cost comes before anything is known of the request.
"""

from __future__ import annotations

from collections.abc import Sequence

from outrider.control.evidence import KNOWN, MOST_LOST
from outrider.control.ledger import EXPLORE
from outrider.control.plan import Arm, Load
from outrider.control.planner import Planner
from outrider.core.row import Row
from outrider.core.step import Batch, RowStep

FORGET = 0.98  # of a prefill cost, whenever a row leaves a drafter out
HOPE = 1.0  # standard deviations above the estimates for a drafter whose prefill has to pay
BET = 0.5  # part of what may be lost that prompts may take which are not expected to pay


class Reading:
    """drafters: those that compute prompts, and draft under a name of their own."""

    def __init__(self, planner: Planner, arms: Sequence[Arm]) -> None:
        names = [arm.sources for arm in arms]
        self.planner, self.arms = planner, arms
        self.drafters = [k for k, arm in enumerate(arms) if arm.prefills and names.count(arm.sources) == 1]

    def leave_out(self, batch: Batch) -> None:
        """Spare new rows the drafters that are not expected to earn what their prefill costs, or did not
        earn it in several requests.

        Each is given a chance so rare that prefill in vain takes `EXPLORE` of the time, unless no acceptance
        would pay.  What nothing but hope or chance speaks for is taken from what may be lost.
        """
        planner, running = self.planner, len(batch)
        rows = [step.row for step in batch if _is_new(step) and step.row.params.speculate]
        most = planner.limits.depth_for(running)
        if not rows or not most or not self.drafters:
            return
        load = Load.plain_step(planner.evidence.forward, running)
        planner.set_grace(load)
        planner.hopes.clear()  # the load is another one
        for k in self.drafters:
            if planner.hopeful(k, load, most):
                self._read(k, rows, load, most)
            else:
                _leave(rows, self.arms[k])

    def _read(self, k: int, rows: Sequence[Row], load: Load, most: int) -> None:
        """Decide for each row whether drafter k reads its prompt."""
        planner, evidence = self.planner, self.planner.evidence
        reach = evidence.reach[k]
        # seconds saved for each token of the output
        expected, hoped = (planner.saved(planner.best(k, reach, z, load, most), load) for z in (0.0, HOPE))
        room, cost_known = BET * evidence.ledger.room, evidence.prefill_cost[k] > 0
        for row in rows:
            cost = evidence.prefill_cost[k] * (len(row.tokens) - row.computed)
            by_chance = planner.random.random() * cost <= EXPLORE * row.remaining * load.token
            worthy = evidence.worth[k] >= -MOST_LOST * (cost + load.token)
            reads = by_chance or (worthy and hoped * row.remaining >= cost)
            is_bet = not worthy or reach.asked < KNOWN or expected * row.remaining < cost
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
