"""What an adaptive controller has chosen and why, for people."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from outrider.control.evidence import Evidence
from outrider.control.plan import Load
from outrider.control.planner import Planner
from outrider.control.prices import pays_off


def report(evidence: Evidence, planner: Planner, load: Load, resting: bool) -> dict[str, Any]:
    """Steps by arm, costs, acceptance, expected and real gain, the ledger.

    outlook: of a drafter for a new request: its best depth, accepted tokens, cost, and whether it pays.
    graded: acceptance by what spoke for a draft before it was asked for.
    resting: no drafter is considered at present.
    """
    pace = load.pace
    evidence.refresh()
    return {
        "summary": asdict(evidence.total) | {"gain": evidence.total.gain},
        "step_ms": {rows: 1e3 * pace * evidence.forward.base(rows) for rows in (1, 2, 4, 8, 16, 32)},
        "drafters": {
            arm.name: reach.report()
            | evidence.drafting.report(k, pace)
            | {"outlook": outlook(k, evidence, planner)}
            | {"graded": {n: own.report() for (j, n), own in evidence.graded.items() if j == k}}
            for k, (arm, reach) in enumerate(zip(evidence.arms, evidence.reach))
        },
        "resting": resting,
        "prefill_ms": 1e3 * evidence.prefill_seconds,
        "reliability": evidence.reliability.table(),
        "acceptance": evidence.module.report() if evidence.module else {"by": "bins"},
        "history": [*evidence.history],
        "ledger": {"loss_ms": 1e3 * evidence.ledger.loss, "room_ms": 1e3 * evidence.ledger.room},
    }


def outlook(k: int, evidence: Evidence, planner: Planner) -> dict[str, Any]:
    """What a drafter is expected to do for a new request, if all requests of the last plans ask it."""
    load, reach = planner.load, evidence.reach[k]
    if not load.batch or not (depth := planner.depth(k, reach, planner.limits.depth_for(load.batch))):
        return {}
    best = planner.prices.best(k, reach, 0.0, load, depth)
    return {
        "depth": best.depth,
        "tokens": round(best.gain, 3),
        "ms": round(1e3 * best.cost, 3),
        "pays": pays_off(best, load),
    }
