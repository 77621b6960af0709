"""Rows that are alike share a plan, and a warm-up tells what drafts cost."""

from __future__ import annotations

import pytest

from outrider.control.acceptance import Outcome
from outrider.control.alike import FEW, kind_of
from outrider.control.cost import ForwardCost
from outrider.control.evidence import Evidence
from outrider.control.first_costs import FirstCosts
from outrider.control.fixed import FixedController, Options
from outrider.control.ledger import CROWD
from outrider.control.plan import Arm, Load
from outrider.control.planner import Planner
from outrider.core.clock import Times, add_one_time
from outrider.core.row import Row
from outrider.core.step import Batch, Commit, RowStep
from outrider.core.tree import DraftTree
from outrider.testing import make_row

DEPTH, SECONDS = 4, 0.005
LIMITS = FixedController(Options(), DEPTH, lambda depth: depth, 100)


def evidence() -> Evidence:
    arms = [Arm((name,), DEPTH, lambda depth: depth) for name in ("first", "second")]
    return Evidence(arms, ForwardCost(dict.fromkeys((1, 8, 64), SECONDS)))


def rows(count: int) -> list[Row]:
    made = [make_row([1, 2, 3], id=str(i), limit=200 + i) for i in range(count)]
    for row in made:
        row.steps = 3
    return made


def batch_of(made: list[Row]) -> Batch:
    return Batch([RowStep(row, len(row.tokens) - 1, 1) for row in made])


def outcome(right: bool) -> Outcome:
    return Outcome(1, False) if right else Outcome(0, True)


def test_many_rows_are_alike_by_what_was_accepted_of_them() -> None:
    made, (good, bad, new) = evidence(), rows(3)
    for row, right in ((good, True), (bad, False)):
        for _ in range(FEW):
            made.state(row).arms[0].reach.learn(outcome(right))
    made.state(new).arms[0].reach.learn(outcome(False))  # one draft tells little
    good_kind, bad_kind, new_kind = (kind_of(row, made.state(row), DEPTH, []) for row in (good, bad, new))
    assert len({good_kind, bad_kind, new_kind}) == 3
    assert kind_of(good, made.state(good), DEPTH, [1]) != kind_of(good, made.state(good), DEPTH, [0])


@pytest.mark.parametrize("count", [4, 32])
def test_alike_rows_get_the_same_plan_and_choices_are_made_once(
    count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, known = evidence(), rows(count)
    for reach in made.reach:
        for _ in range(50):
            reach.learn(outcome(True))
    planner, chosen = Planner(LIMITS, made), list[Row]()
    choose = planner._choose

    def counted(row: Row, *more: object) -> object:
        chosen.append(row)
        return choose(row, *more)  # type: ignore[arg-type]

    monkeypatch.setattr(planner, "_choose", counted)
    batch = batch_of(known)
    plans = planner.plans(batch, Load.of(batch, made.forward))
    again = planner.plans(batch, Load.of(batch, made.forward))  # now all have a state
    assert len(plans) == len(again) == count
    assert len({id(plan.state) for plan in again.values()}) == count
    assert len({(plan.budget, plan.loss) for plan in plans.values()}) == 1
    assert len(chosen) == (2 if count > CROWD else 1 + count)


def test_plain_steps_of_nearly_as_many_requests_need_not_be_measured_again() -> None:
    forward = ForwardCost({1: SECONDS})
    forward.learn_plain(32, 32, 0, SECONDS, steps=7)
    assert [forward.plain_near(n) for n in (24, 26, 32, 42, 60)] == [0, 7, 7, 7, 0]


def step(controller: FirstCosts, made: list[Row], nodes: int, times: Times, once: float = 0.0) -> None:
    batch = batch_of(made)
    for each, budget in zip(batch, controller.budget(batch)):
        each.budget = budget
        each.tree = DraftTree.chain([7] * nodes, [0.5] * nodes)
        each.emitted = [7]
    if once:
        add_one_time(once)
    controller.learn(Commit(batch), times)


def test_a_warm_up_teaches_what_drafts_cost_by_depth_and_rows() -> None:
    made, two = evidence(), rows(2)
    controller = FirstCosts(LIMITS, made)
    for draft_method, depth, seconds in (("second", 1, 0.002), ("second", DEPTH, 0.0026), (None, DEPTH, 9.0)):
        for row in two:
            row.params = row.params.__class__(draft_method=draft_method, max_draft_tokens=depth)
        for once in (1.0, 0.0, 0.0, 0.0):  # the first one records a graph
            step(controller, two, depth, Times(9.0 if once else seconds, SECONDS, 0.0), once)
    controller.teach()
    fixed, per_level = made.drafting.line(1, 2)
    assert fixed == pytest.approx(0.0018, rel=0.1) and per_level == pytest.approx(0.0002, rel=0.2)
    assert not made.drafting.known(0), "both draft where no method is named"
    assert made.reach[1].asked == 0


def test_a_row_that_may_lose_nothing_more_refuses_no_other() -> None:
    made, known = evidence(), rows(16)
    for reach in made.reach:
        for _ in range(50):
            reach.learn(outcome(True))
    planner, batch = Planner(LIMITS, made), batch_of(known)
    for row in known:
        made.state(row)
    made.state(known[0]).ledger.loss = 1.0
    plans = planner.plans(batch, Load.of(batch, made.forward))
    assert known[0] not in plans and len(plans) == 15


def test_rows_of_different_lengths_are_alike() -> None:
    made = evidence()
    known = [make_row([1, 2, 3], id=str(i), limit=100 + i) for i in range(16)]
    kinds = {kind_of(row, None, min(DEPTH, row.draft_depth), []) for row in known}
    assert len(kinds) == 1 and made.arms


def test_an_assumed_pace_is_not_kept() -> None:
    forward = ForwardCost(dict.fromkeys((1, 8, 64), SECONDS))
    assert forward.growing(32) == pytest.approx(0.0, abs=0.01)
    forward.learn_plain(32, 32, 0, 2 * SECONDS, steps=7)
    assert forward.growing(32) == pytest.approx(0.0, abs=0.01)
