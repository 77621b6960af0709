"""Choice of the drafters that compute the prompts of new requests.

One with a model of its own cannot draft before that, and the cost comes before anything is known of the
request.  In a large batch none computes a prompt before it is asked for a draft of the request.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from outrider.control.evidence import KNOWN, MOST_LOST
from outrider.control.ledger import CROWD
from outrider.control.plan import Arm, Load
from outrider.control.planner import Planner
from outrider.control.prices import saved
from outrider.core.row import Row
from outrider.core.step import Batch

FORGET = 0.98  # of a prefill cost, whenever a row leaves a drafter out
HOPE = 1.0  # standard deviations above the estimates for a drafter whose prefill has to pay
MOST_PREFILL = 0.5  # of what may still be lost, in a step: for requests in which it is not expected to pay


class Outlook(NamedTuple):
    """What a drafter is expected to do beside so many requests.

    known: asks and steps with drafts that this comes from, and the pace of the machine.
    hopeful: it would pay if all its tokens were accepted.
    expected, hoped: seconds that it saves for each token of the output.
    need: seconds that have to be left for its shortest draft; infinite if unknown.
    """

    known: tuple[float, int, float]
    hopeful: bool
    expected: float
    hoped: float
    need: float


class PrefillChoice:
    """Decides which drafters prefill new rows.

    computing: drafters that compute prompts.  drafters: those of them that draft under a name of their own,
    and so can be left out.
    outlooks: by drafter, requests and depth.
    """

    def __init__(self, planner: Planner) -> None:
        arms = planner.arms
        names = [arm.sources for arm in arms]
        self.planner, self.arms = planner, arms
        self.computing = [k for k, arm in enumerate(arms) if arm.prefills]
        self.drafters = [k for k in self.computing if names.count(arms[k].sources) == 1]
        self.outlooks: dict[tuple[int, int, int], Outlook] = {}

    def leave_out(self, batch: Batch) -> None:
        """Spare new rows the drafters that are not expected to earn what their prefill costs, or did not
        earn it in several requests.

        What counts is the batch in which they are going to decode, beside those that still wait.
        Each is given a chance so rare that prefill in vain takes `EXPLORE` of the time, unless no acceptance
        would pay.  Where nothing but hope or chance speaks for it, it counts as loss.
        """
        if not self.drafters:
            return
        evidence = self.planner.evidence
        rows = [step.row for step in batch if not step.row.steps and step.row.params.speculate]
        rows = [row for row in rows if row not in evidence.decided]
        most = self.planner.limits.depth_for(len(batch))
        if not rows or not most:
            return
        if len(evidence.decided) > len(batch):
            evidence.drop_ended()
        evidence.decided.update(dict.fromkeys(rows, 0.0))
        if (count := len(batch) + batch.waiting) > CROWD:
            for k in self.drafters:
                _leave(rows, self.arms[k])
            return
        load = Load.plain_step(evidence.forward, count, evidence.tail)
        self.planner.accounts.set_grace(load)
        for k in self.drafters:
            outlook = self._outlook(k, load, most)
            if outlook.hopeful:
                self._choose(k, rows, load, outlook)
            else:
                _leave(rows, self.arms[k])

    def _outlook(self, k: int, load: Load, most: int) -> Outlook:
        """The outlook of drafter k, computed again after further drafts or at another pace."""
        planner, key = self.planner, (k, load.batch, most)
        reach, found = planner.evidence.reach[k], self.outlooks.get(key)
        known = reach.asked, planner.evidence.forward.steps, round(load.pace, 1)
        if found is None or found.known != known:
            prices = planner.prices
            prices.hopes.clear()  # the load is another one
            hopeful, depth = prices.hopeful(k, load, most), planner.depth(k, reach, most)
            expected, hoped = (saved(prices.best(k, reach, z, load, depth), load) for z in (0.0, HOPE))
            need = planner.need(k, load, expected > 0)
            found = self.outlooks[key] = Outlook(known, hopeful, expected, hoped, need)
        return found

    def _choose(self, k: int, rows: Sequence[Row], load: Load, outlook: Outlook) -> None:
        """Leave drafter k out of the rows that it does not prefill."""
        evidence, draw = self.planner.evidence, self.planner.random.random
        room, cost_known = MOST_PREFILL * evidence.ledger.room, evidence.prefill_cost[k] > 0
        for row in rows:
            cost = evidence.prefill_cost[k] * (len(row.tokens) - row.computed)
            by_chance = draw() * cost <= load.explore * row.remaining * load.token
            worthy = evidence.worth[k] >= -MOST_LOST * (cost + load.token)
            # what was lost so far may leave no room for any draft while the row runs
            room_later = evidence.ledger.room + load.loss_share * row.remaining * load.decode
            reachable = room_later >= outlook.need or math.isinf(outlook.need)
            chosen = reachable and (by_chance or (worthy and outlook.hoped * row.remaining >= cost))
            doubtful = not worthy or outlook.known[0] < KNOWN or outlook.expected * row.remaining < cost
            affordable = cost <= room if cost_known else row is rows[0]
            if not chosen or (doubtful and not affordable):
                evidence.prefill_cost[k] *= FORGET  # not measured any more, it may be wrong
                _leave([row], self.arms[k])
            elif doubtful:
                room -= cost
                evidence.decided[row] += cost
                evidence.ledger.add(cost, 0.0)

    def computes(self, batch: Batch) -> bool:
        """Whether some drafter computes a prompt in this step."""
        return any(self._computed_by(k, batch) for k in self.computing)

    def tells_cost(self, batch: Batch) -> bool:
        """Whether one does so whose prefill was never measured."""
        costs = self.planner.evidence.prefill_cost
        return any(not costs[k] and self._computed_by(k, batch) for k in self.drafters)

    def _computed_by(self, k: int, batch: Batch) -> bool:
        sources = self.arms[k].sources
        return any(step.known > 1 and not step.row.left_out.issuperset(sources) for step in batch)


def _leave(rows: Sequence[Row], arm: Arm) -> None:
    for row in rows:
        row.left_out |= frozenset(arm.sources)
