"""What a controller has learned of its drafters, as JSON: kept for the next start of the same engine.

Old evidence is a prior: it counts for at most `MOST` asks, so that other texts soon outweigh it.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import astuple
from typing import Any, NamedTuple, Protocol

from outrider.control.acceptance import FIRST_GRADED, FIRST_REACH, LEVELS, Calibration, Reach
from outrider.control.cost import DraftCost
from outrider.control.ledger import RESERVE, Ledger
from outrider.control.line_cost import LineCost

log = logging.getLogger("outrider")

MOST = 64.0
EVERY = 5.0  # seconds between two writes: each takes a tenth of a step


class Memory(Protocol):
    """Where JSON is kept."""

    def read(self) -> Any:
        """None if there is nothing."""

    def write(self, value: Any) -> None: ...


class Learned(NamedTuple):
    """Acceptance and costs of every drafter, over all requests, and what they have saved.

    prefill_cost: seconds by prompt token.  graded: acceptance by drafter and grade of a draft, above 0.
    """

    calibration: Calibration
    reach: Sequence[Reach]
    drafting: DraftCost
    prefill_cost: list[float]
    ledger: Ledger
    graded: dict[tuple[int, int], Reach]

    def written(self) -> dict[str, Any]:
        return {
            "calibration": [[key, *cell] for key, cell in self.calibration.cells.items()],
            "reach": [_of_reach(reach) for reach in self.reach],
            "costs": [[*key, *astuple(line[0])] for key, line in self.drafting.lines.items()],
            "prefill_cost": self.prefill_cost,
            "saved": max(0.0, -self.ledger.loss),
            "graded": [[*key, _of_reach(reach)] for key, reach in self.graded.items() if reach.asked],
        }


def learned(found: Any, drafters: int, plain: float, by_level: Collection[int] = ()) -> Learned:
    """What was `written` of so many drafters; nothing for anything else.  plain: seconds of a plain step."""
    drafting = DraftCost(plain, by_level)
    try:
        reach = [_reach(part) for part in found["reach"]]
        prefill = [_count(seconds) for seconds in found["prefill_cost"]]
        if len(reach) == len(prefill) == drafters:
            calibration, ledger = _calibration(found), Ledger(loss=-_count(found["saved"]), kept=RESERVE)
            costs = {(int(k), int(rows)): LineCost(*map(_count, line)) for k, rows, *line in found["costs"]}
            graded = {(int(k), int(grade)): _reach(part, FIRST_GRADED) for k, grade, part in found["graded"]}
            for (k, rows), cost in costs.items():
                drafting.set_line(k, rows, cost)
            return Learned(calibration, reach, drafting, prefill, ledger, graded)
        unlike = f"it is of {len(reach)} drafters"
    except (KeyError, TypeError, ValueError, IndexError, AttributeError, ArithmeticError) as error:
        unlike = repr(error)
    if found is not None:
        log.warning("what was learned of drafters is of another form, and begins anew: %s", unlike)
    new, none = [Reach() for _ in range(drafters)], [0.0] * drafters
    return Learned(Calibration(), new, drafting, none, Ledger(kept=RESERVE), {})


def _calibration(found: Mapping[str, Any]) -> Calibration:
    made = Calibration()
    for key, *cell in found["calibration"]:
        accepted, rejected = map(_count, cell)
        part = min(1.0, MOST / max(1.0, accepted + rejected))
        made.cells[int(key)] = [part * accepted, part * rejected]
    return made


def _of_reach(reach: Reach) -> dict[str, Any]:
    unit = 1 / reach.weight
    return {
        "hits": [unit * hits for hits in reach.hits],
        "misses": [unit * misses for misses in reach.misses],
        "empty": unit * reach.empty,
        "per_level": reach.per_level,
        "drafted": reach.drafted,
        "asked": reach.asked,
    }


def _reach(found: Mapping[str, Any], expected: float = FIRST_REACH) -> Reach:
    made = Reach(expected=expected)
    hits, misses = ([_count(n) for n in found[key]] for key in ("hits", "misses"))
    if not len(hits) == len(misses) == LEVELS:
        raise ValueError(f"{len(hits)} levels instead of {LEVELS}")
    part = min(1.0, MOST / max(1.0, hits[0] + misses[0]))
    made.hits, made.misses = [part * n for n in hits], [part * n for n in misses]
    made.empty = part * min(misses[0], _count(found["empty"]))
    made.per_level, made.drafted = _count(found["per_level"]), min(1.0, _count(found["drafted"]))
    made.asked = int(_count(found["asked"]))
    if not made.drafted:
        raise ValueError("no level was ever drafted")
    return made


def _count(value: Any) -> float:
    number = float(value)
    if not 0 <= number < 1e12:
        raise ValueError(f"{value!r} is no count")
    return number
