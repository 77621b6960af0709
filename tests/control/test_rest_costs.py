"""What a rest does not do, since it would take more than it can gain."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from test_rest import DEPTH, PLAIN, controller, looks_of, step

from outrider.control.auto import AutoController
from outrider.control.choose import Option
from outrider.control.plan import Load, Plan, Try
from outrider.control.rest import LISTEN, MOST_LISTEN
from outrider.control.room import Room
from outrider.core.row import Row
from outrider.core.step import Batch, RowStep
from outrider.testing import make_row

LONG = 1000  # steps


def rows_of(count: int) -> list[Row]:
    return [make_row([1] * 5, id=str(i), limit=LONG) for i in range(count)]


def graded(auto: AutoController, grades: dict[str, int]) -> None:
    arms = [auto.arms[0]._replace(grade=lambda row: grades.get(row.id, 0))]
    auto.arms = auto.evidence.arms = auto.planner.arms = arms


@pytest.mark.parametrize(("look_up", "pause"), [(0.0, LISTEN), (0.019 * PLAIN, 10), (PLAIN, MOST_LISTEN)])
def test_look_ups_for_drafts_take_little_of_the_time(look_up: float, pause: int) -> None:
    auto, seconds, listened = controller(accepted=0), [0.0], list[int]()
    rows = rows_of(1)
    step(auto, rows)
    rest = auto.rest
    assert rest is not None
    rest.longest, rest.clock = LONG, lambda: seconds[0]

    def promising(*given: object) -> None:
        listened.append(rest.taken)
        seconds[0] += look_up

    type(rest)._promising, before = promising, type(rest)._promising  # type: ignore
    try:
        for _ in range(3 * MOST_LISTEN):
            step(auto, rows)
    finally:
        type(rest)._promising = before  # type: ignore[method-assign]
    assert listened[0] == LISTEN and listened[1] - listened[0] == pause


def test_a_failed_trial_needs_no_second_look() -> None:
    auto, rows = controller(accepted=0), rows_of(1)
    auto.evidence.trials[0].room = PLAIN
    looks = looks_of(auto)
    while not step(auto, rows)[0].budget.nodes:
        assert len(looks) < 5
    before = len(looks)
    step(auto, rows)
    assert len(looks) == before and auto.rest is not None


def test_a_rest_goes_on_while_plans_would_take_more_than_may_be_lost() -> None:
    auto, rows = controller(accepted=0), rows_of(1)
    step(auto, rows)
    rest, looks = auto.rest, looks_of(auto)
    assert rest is not None
    rest.longest, auto.look_seconds, auto.evidence.ledger.loss = 3, 5 * PLAIN, 0.0
    auto.evidence.ledger.earned = auto.evidence.ledger.loss - auto.evidence.ledger.room
    for _ in range(10):
        step(auto, rows)
    assert auto.rest is rest and not looks
    auto.evidence.ledger.earned += 10 * PLAIN
    rest.longest = rest.quiet = rest.taken
    step(auto, rows)
    assert len(looks) == 1


def test_rows_that_promise_nothing_are_not_planned_for_at_the_end_of_a_rest() -> None:
    auto, grades, planned = controller(accepted=DEPTH), dict[str, int](), list[list[Row]]()
    graded(auto, grades)
    rows = rows_of(2)
    auto.evidence.ledger.loss = auto.evidence.ledger.used = 1.0
    step(auto, rows)
    auto.evidence.ledger.loss, grades["1"], plans = 0.0, 1, auto.planner.plans

    def counted(batch: Batch, load: Load, steps: Sequence[RowStep] | None = None) -> dict[Row, Plan]:
        planned.append([each.row for each in steps or batch])
        return plans(batch, load, steps)

    assert auto.rest is not None
    auto.rest.longest = LONG
    auto.planner.plans = counted  # type: ignore[method-assign, assignment]
    for _ in range(2 * LISTEN):
        if not planned:
            step(auto, rows)
    assert planned == [[rows[1]]]


@pytest.mark.parametrize(("asks", "surprising"), [(2, False), (20, True)])
def test_drafts_that_were_asked_for_in_vain_are_a_surprise(asks: int, surprising: bool) -> None:
    auto, rows, room = controller(accepted=DEPTH), rows_of(asks), Room()
    state = auto.evidence.state(rows[0])
    plan = Plan(state, [Option(0, 1, 0.5, 0.0, 0.0)], set(), auto.limits._budget(1), {0: 0.0}, 0.0)
    batch = Batch([RowStep(row, len(row.tokens) - 1, 1) for row in rows])
    room.set(auto.evidence.ledger, dict.fromkeys(rows, plan))
    room.enter(batch, {r: Try(plan, asked={0: 1}) for r in range(asks)}, PLAIN)
    assert room.surprising == surprising
