"""When a row may get a plan, while no drafter is considered."""

from __future__ import annotations

import math

from outrider.control.evidence import KNOWN, LONGEST_PAUSE
from outrider.control.ledger import USED
from outrider.control.plan import Load
from outrider.control.planner import OPTIMISM, Planner
from outrider.control.prices import need, pays_off
from outrider.core.row import Row


def closed(planner: Planner) -> int:
    """Steps after the last plans until a new row may get one."""
    load, accounts, waits = planner.load, planner.accounts, [LONGEST_PAUSE]
    most = planner.limits.depth_for(load.batch)
    courage = accounts.courage(min(accounts.room_of(False), USED * accounts.row_grace))
    for k, reach in enumerate(planner.evidence.reach):
        if (depth := planner.depth(k, reach, most)) and planner.prices.hopeful(k, load, most):
            best = planner.best(k, None, reach, depth, courage)
            if math.isinf(best.cost):
                waits.append(1)
                continue
            pays, rows = pays_off(best, load), planner.crowds[k].trial
            # one new row is not enough for a trial of many, and one of a known drafter can wait
            waits_for_others = rows > 1 or reach.asked >= KNOWN
            pause = 0 if pays else max(int(waits_for_others), accounts.wait(k, rows * best.cost))
            room = accounts.room_of(planner.surely_pays(reach, best))
            waits.append(max(pause, accounts.until(need(best.cost, pays) - room)))
    return min(waits)


def least_need(planner: Planner) -> float:
    """Seconds that have to be left for a trial of one token, of the cheapest drafter; 0 if unknown."""
    needs = [planner.need(k, planner.load, False) for k in range(len(planner.arms))]
    return min(filter(math.isfinite, needs), default=0.0)


def may_pay(planner: Planner, row: Row, load: Load, crowd: int) -> bool:
    """Whether a drafter pays for a row by what speaks for its draft, or may be tried to learn that.

    crowd: rows that are expected to ask together.
    """
    most = min(planner.limits.depth_for(load.batch), row.draft_depth)
    for k, arm in enumerate(planner.arms):
        if arm.grade(row):
            reach = planner.evidence.reach_of(k, row)
            best = planner.prices.best(k, reach, OPTIMISM, load, planner.depth(k, reach, most), crowd)
            tried = reach.asked < KNOWN and planner.evidence.trials[k].room >= best.cost
            if tried or pays_off(best, load):
                return True
    return False
