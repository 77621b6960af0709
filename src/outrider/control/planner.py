"""Plans of the adaptive controller: which drafters to ask for a row, and how deep.

A drafter is asked if its expected tokens pay for what asking and verification cost.  The estimates are drawn
by Thompson sampling, optimistic while the ledger has room.  One that does not seem to pay is tried again
after a pause that keeps its expected loss below `EXPLORE` of the time.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Sequence

from outrider.control import choose
from outrider.control.acceptance import Reach
from outrider.control.choose import Option, Price
from outrider.control.evidence import EXPLORE, LONGEST_PAUSE, Evidence
from outrider.control.fixed import FixedController
from outrider.control.ledger import SHARE, USED
from outrider.control.plan import Arm, Load, Plan, RowState
from outrider.core.row import Row
from outrider.core.step import Batch, RowStep
from outrider.core.tree import Budget

OPTIMISM = 0.4  # standard deviations of a draw of an estimate
MARGIN = 1.2  # of a step's largest loss over its expected cost
DIGEST = 16  # steps that are taken in together, once the drafters are known
FORGET = 0.98  # of a prefill cost, whenever a row leaves a drafter out
HOPE = 1.0  # standard deviations above the estimates for a drafter whose prefill has to pay


class Planner:
    """grace, total_grace: plain steps, of `least` seconds at least, that a request, and all together, may
    lose (see ledger.py).

    load: of the step that was planned last.  order: drafters of a mix, cheapest first.
    """

    def __init__(
        self,
        limits: FixedController,
        arms: Sequence[Arm],
        evidence: Evidence,
        grace: float,
        total_grace: float,
        least: float,
        seed: int = 0,
    ) -> None:
        self.limits, self.arms, self.evidence = limits, arms, evidence
        self.grace, self.total_grace, self.least = grace, total_grace, least
        self.random = random.Random(seed)
        self.load = Load(evidence.forward)
        self.order: Sequence[int] = range(len(arms))
        # drafters that compute prompts, and draft under a name of their own
        self.prefilling = [
            k
            for k, arm in enumerate(arms)
            if arm.prefills and [a.sources for a in arms].count(arm.sources) == 1
        ]
        self.room = self.row_grace = 0.0  # seconds: left of the ledger of all requests; grace of each

    def plans(self, batch: Batch, load: Load) -> dict[int, Plan]:
        """Row of the batch -> its plan, for those with a drafter that is expected to pay or due for a try."""
        ledger, self.load = self.evidence.ledger, load
        plain = max(load.plain, self.least)
        self.row_grace, ledger.grace = self.grace * plain, self.total_grace * plain
        self.room = ledger.room
        most = self.limits.depth_for(len(batch))
        # one draw for all rows, since they share what an ask costs
        zs = [OPTIMISM * abs(self.random.gauss(0.0, 1.0)) for _ in self.arms]
        plans: dict[int, Plan] = {}
        for r, step in enumerate(batch):
            row = step.row
            if not step.emits or not (depth := min(most, row.draft_depth)):
                continue
            state = self.evidence.state(row)
            if state.asleep <= row.steps and (plan := self._plan(state, row, depth, zs)):
                plans[r] = plan
        if len(self.arms) > 1:
            line = self.evidence.drafting.line
            self.order = sorted(range(len(self.arms)), key=lambda k: line(k, 1)[::-1])
        return plans

    def leave_out(self, batch: Batch) -> None:
        """Spare new rows the drafters that are not expected to earn what their prefill costs.

        Each is given a chance so rare that prefill in vain takes `EXPLORE` of the time.
        """
        running = len(batch)
        rows = [step.row for step in batch if _is_new(step) and step.row.params.speculate]
        most = self.limits.depth_for(running)
        if not rows or not most:
            return
        load = Load.plain_step(self.evidence.forward, running)
        plain = load.plain / running  # seconds of a token
        for k in self.prefilling:
            reach = self.evidence.reach[k]
            gains = reach.gains(HOPE, self._depth(k, most))
            best = choose.best_option(k, gains, self._price(k, reach, load), running, load.plain)
            saved = (best.gain * plain - best.cost) / (1 + best.gain)  # by each token of the output
            for row in rows:
                cost = self.evidence.prefill_cost[k] * (len(row.tokens) - row.computed)
                lost = self.random.random() * cost > EXPLORE * row.remaining * plain
                if saved * row.remaining < cost and lost:
                    row.left_out |= frozenset(self.arms[k].sources)
                    self.evidence.prefill_cost[k] *= FORGET  # it is not measured any more, and may be wrong

    def interval(self, plans: Iterable[Plan]) -> int:
        """Steps until plans are made again: few while drafters are new or losses come near the room."""
        interval, total = DIGEST, 0.0
        for plan in plans:
            asked = min([plan.state.reach[option.drafter].asked for option in plan.options])
            loss = DIGEST * MARGIN * sum([option.cost for option in plan.options])
            total += loss
            if plan.exploring or loss > plan.state.ledger.room:
                return 1
            interval = min(interval, 1 + asked // 2)
        return interval if total <= self.evidence.ledger.room else 1

    def _plan(self, state: RowState, row: Row, most: int, zs: Sequence[float]) -> Plan | None:
        load, chosen, exploring, wait = self.load, list[Option](), set[int](), LONGEST_PAUSE
        state.ledger.grace, step = self.row_grace, row.steps
        room = min(state.ledger.room, self.room)
        courage = max(-1.0, min(1.0, 2 * room / (USED * self.row_grace) - 1))
        for k in range(len(self.arms)):
            if not (depth := self._depth(k, most)) or not row.drafts_with(self.arms[k].sources):
                continue
            reach = state.reach[k]
            reach.fade(step)
            gains, price = reach.gains(courage * zs[k], depth), self._price(k, reach, load)
            best = choose.best_option(k, gains, price, load.batch, load.plain)
            need = MARGIN * best.cost
            if best.gain * load.plain <= load.batch * best.cost:
                need *= 2
                if step < state.retry[k]:
                    wait = min(wait, state.retry[k] - step)
                    continue
                exploring.add(k)
            if need <= room:
                room -= MARGIN * best.cost
                self.room -= MARGIN * best.cost
                chosen.append(best)
            else:
                earned = SHARE * load.plain / load.batch  # by each plain step
                wait = min(wait, math.ceil((need - room) / earned))
        if not chosen:
            state.asleep = step + max(1, wait)
            return None
        chosen.sort(key=lambda option: option.cost)
        return Plan(state, chosen, exploring, self._bound(chosen))

    def _depth(self, k: int, most: int) -> int:
        """The deepest draft that a drafter may be asked for.  Its first ones are short: nothing is known."""
        return min(most, self.arms[k].depth, 1 << min(10, self.evidence.reach[k].asked))

    def _bound(self, chosen: Sequence[Option]) -> Budget:
        depth = max(option.depth for option in chosen)
        nodes = sum(self.arms[option.drafter].size(option.depth) for option in chosen)
        return Budget(depth, nodes if len(self.arms) == 1 else min(nodes, self.limits.size(depth)))

    def _price(self, k: int, reach: Reach, load: Load) -> Price:
        """Seconds for one row, if as many ask as lately."""
        rows = max(1.0, self.evidence.asking[k] * load.batch)
        fixed, per_level = self.evidence.drafting.line(k, round(rows))
        share, added = load.pace / rows, load.verify

        def verify(nodes: float) -> float:
            return added(round(rows * nodes)) / rows

        return Price(share * fixed, share * per_level, reach.per_level, verify)


def _is_new(step: RowStep) -> bool:
    """Whether this is the first step of its row."""
    return not step.row.steps and step.start == (step.row.cached or 0)
