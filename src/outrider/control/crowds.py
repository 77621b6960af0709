"""The rows that share what a draft costs: one for some rows takes nearly as long as one for all."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable
from typing import NamedTuple

from outrider.control.evidence import Evidence
from outrider.control.plan import Plan
from outrider.core.row import Row


class Crowd(NamedTuple):
    """The rows that share what a draft of one drafter costs.

    rows: that are assumed to ask together.  trial: that a trial takes at least.  due: that may try it.
    """

    rows: int = 0
    trial: int = 0
    due: int = 0


def crowd_of(k: int, rows: Iterable[Row], asking: int, evidence: Evidence, trial: int) -> Crowd:
    """The crowd of drafter k.  asking: further rows that ask it."""
    able = [row for row in rows if row.draft_depth and row.accepts(evidence.arms[k].sources)]
    states = [(row, evidence.states.get(row)) for row in able]
    due = sum(state is None or state.arms[k].retry <= row.steps for row, state in states)
    return Crowd(max(1, len(able) + asking), trial, due)


def shrink(crowds: list[Crowd], plans: Collection[Plan], others: Counter[int]) -> bool:
    """Set the crowds to the rows that ask, where these are half as many or fewer.

    others: further rows that ask each drafter.  Returns whether some crowd is smaller now.
    """
    asking = others + Counter(o.drafter for plan in plans for o in plan.options)
    paying = Counter(o.drafter for plan in plans for o in plan.options if o.drafter not in plan.exploring)
    smaller = [k for k in paying if 2 * asking[k] <= crowds[k].rows]
    for k in smaller:
        crowds[k] = crowds[k]._replace(rows=asking[k])
    return bool(smaller)


def relieved(now: int, before: int) -> bool:
    """Whether so many fewer rows run that what did not pay may pay."""
    return 2 * now <= before
