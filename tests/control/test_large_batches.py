"""Of a large batch, a step plans and judges little: what it has to, for the rows that need it."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest

from outrider.control.acceptance import Outcome
from outrider.control.auto import AutoController
from outrider.control.cost import ForwardCost
from outrider.control.evidence import JUDGED, Evidence
from outrider.control.fixed import FixedController, Options
from outrider.control.ledger import Trials, allowance
from outrider.control.plan import Arm, Load
from outrider.control.planner import Settings
from outrider.core.clock import Times
from outrider.core.row import Row
from outrider.core.step import Batch, Commit, RowStep
from outrider.core.tree import DraftTree
from outrider.testing import make_row

DEPTH, PLAIN, HELD = 4, 0.001, 1000


@pytest.fixture
def auto() -> AutoController:
    """One drafter that is known to pay.  Its plans hold for `HELD` steps."""
    limits = FixedController(Options(), DEPTH, lambda depth: depth, 100)
    costs = ForwardCost({1: PLAIN, 256: 1.2 * PLAIN})
    arm = Arm(("drafter",), DEPTH, lambda depth: depth)
    auto = AutoController(limits, Evidence([arm], costs), Settings(clock=lambda: 0.0))
    for i in range(100):
        auto.evidence.reach[0].learn(Outcome(DEPTH - 1, True))
        auto.evidence.drafting.learn(0, 1, 1 + i % DEPTH, 1e-5)
    auto._steps_of_plans = lambda took: HELD  # type: ignore[method-assign]
    return auto


def rows_of(count: int, limit: int = 10_000) -> list[Row]:
    return [make_row([1, 2, 3], id=str(i), limit=limit) for i in range(count)]


def step(auto: AutoController, rows: Sequence[Row], right: int = DEPTH - 1) -> Batch:
    """A step in which so many draft tokens of each row are right."""
    batch = Batch([RowStep(row, len(row.tokens) - 1, 1) for row in rows])
    for each, budget in zip(batch, auto.budget(batch)):
        each.budget = budget
        each.tree = DraftTree.chain([7] * budget.depth, [0.9] * budget.depth)
    auto.trim(batch)
    for each in batch:
        each.accepted = [*range(min(right, each.tree.size))]
        each.emitted = [7] * min(len(each.accepted) + 1, each.row.limit - len(each.row.tokens))
        each.row.tokens += each.emitted
        each.row.steps += 1
        if len(each.row.tokens) >= each.row.limit:
            each.row.finish_reason = "length"
    auto.room.shortfall = -1.0  # nothing else ends the plans
    auto.learn(Commit(batch), Times(1e-5, PLAIN, 0.0))
    return batch


def planned(auto: AutoController) -> list[Row]:
    """Will hold the rows for which something is planned."""
    found, plan = list[Row](), auto.planner._plan
    auto.planner._plan = lambda row, most: (found.append(row), plan(row, most))[1]  # type: ignore
    return found


def drafting(auto: AutoController, rows: Sequence[Row]) -> None:
    """Steps until all rows have plans that hold."""
    for _ in range(12):
        step(auto, rows)
    assert {*rows} <= auto.plans.keys() and not auto.stale


def test_plans_hold_when_another_request_begins_or_ends(auto: AutoController) -> None:
    rows, late = rows_of(4), make_row([1, 2, 3], id="late", limit=20)
    drafting(auto, rows)
    found, before = planned(auto), {row: auto.plans[row] for row in rows}
    step(auto, [*rows, late])  # the first one of so many rows may be plain
    while late.finish_reason is None:
        step(auto, [*rows, late])
    for _ in range(4):
        step(auto, rows)
    assert {*found} == {late}
    assert auto.plans == before


def test_a_row_is_considered_again_after_the_end_of_its_prompt(auto: AutoController) -> None:
    """Drafters that read the prompt in that step lack it when the step is planned."""
    rows, late = rows_of(4), make_row([1] * 40, id="late", limit=200)
    drafting(auto, rows)
    step(auto, [*rows, make_row([1, 2, 3], id="other")])  # the first one of so many rows may be plain
    found = planned(auto)
    batch = Batch(
        [RowStep(row, len(row.tokens) - 1, 1) for row in rows] + [RowStep(late, 0, 40)], prefill=True
    )
    auto.budget(batch)
    auto.trim(batch)
    for each in batch:
        each.emitted, each.row.steps = [7], each.row.steps + 1
        each.row.tokens.append(7)
    auto.learn(Commit(batch), Times(0.0, PLAIN, 0.0))
    for _ in range(3):
        step(auto, [*rows, late])
    assert found == [late, late]


def test_the_summary_of_a_request_that_ends_is_complete(auto: AutoController) -> None:
    rows, short = rows_of(4), make_row([1, 2, 3], id="short", limit=60)
    drafting(auto, [*rows, short])
    while short.finish_reason is None:
        step(auto, [*rows, short])
    summary = short.drafting
    assert summary is not None and sum(summary.steps.values()) == short.steps
    assert summary.accepted == len(short.tokens) - short.prompt - short.steps
    assert summary.plain_seconds > summary.seconds > 0


def test_a_row_that_tries_a_drafter_leaves_the_plans_of_others_alone(auto: AutoController) -> None:
    rows = rows_of(4)
    drafting(auto, rows)
    found = planned(auto)
    auto.plans[rows[1]] = auto.plans[rows[1]]._replace(exploring={0})
    for _ in range(3):
        step(auto, rows)
    assert found == [rows[1]]


def test_the_drafts_of_a_large_batch_are_judged_in_turns(auto: AutoController) -> None:
    rows = rows_of(4 * JUDGED)
    drafting(auto, rows)
    auto._digest()
    before = {row: auto.evidence.states[row].arms[0].reach.asked for row in rows}
    for _ in range(8):
        step(auto, rows)
    auto._digest()
    assert {auto.evidence.states[row].arms[0].reach.asked - before[row] for row in rows} == {2}


@pytest.mark.parametrize("rows", [1, 40, 100, 520])
def test_costs_of_many_nodes_are_those_of_each_number(rows: int) -> None:
    load = Load(ForwardCost({1: PLAIN, 64: 1.2 * PLAIN}), rows=rows, batch=rows, context=64)
    assert [*load.costs_of(200)][:201] == pytest.approx([load.verify(nodes) for nodes in range(201)])


def test_the_load_behind_a_prompt_is_that_of_decoding(auto: AutoController) -> None:
    rows, late = rows_of(4), make_row([1] * 500, id="late", limit=900)
    drafting(auto, rows)
    with_prompt = Batch([RowStep(row, len(row.tokens) - 1, 1) for row in rows], prefill=True)
    with_prompt.append(RowStep(late, 0, 500))
    auto.budget(with_prompt)
    assert auto.load.rows == 504 and not auto.load.decodes_only
    auto.trim(with_prompt)
    for each in with_prompt:
        each.emitted = [7]
        each.row.tokens.append(7)
        each.row.steps += 1
    auto.learn(Commit(with_prompt), Times(0.0, PLAIN, 0.0))
    step(auto, [*rows, late])
    assert auto.load.rows == 5 and auto.load.decodes_only


def test_a_preempted_row_loses_its_plan_and_gets_no_draft_beside_its_text(auto: AutoController) -> None:
    rows = rows_of(4)
    drafting(auto, rows)
    step(auto, rows[:3])
    assert rows[3] not in auto.plans
    drafting(auto, rows)
    again = Batch([RowStep(row, len(row.tokens) - 1, 1) for row in rows[:3]], prefill=True)
    again.append(RowStep(rows[3], 0, 4, False))  # a part of its text, which emits nothing
    assert [budget.depth > 0 for budget in auto.budget(again)] == [True, True, True, False]


def test_a_trial_that_a_large_batch_never_allows_is_not_waited_for() -> None:
    trials = Trials(0.0)
    assert trials.wait(0.003, 0.01) < math.inf
    assert trials.wait(0.003, 0.01, allowance(64)) == math.inf


def test_the_time_of_a_decision_is_charged_to_trials_once(auto: AutoController) -> None:
    """Not once for every row that tries the drafter."""
    rows = rows_of(8)
    drafting(auto, rows)
    auto._digest()
    auto.plans = {row: plan._replace(exploring={0}) for row, plan in auto.plans.items()}
    costs = sum(option.cost for plan in auto.plans.values() for option in plan.options)
    before, auto.evidence.host = auto.evidence.trials[0].room, PLAIN
    step(auto, rows, right=0)
    assert before - auto.evidence.trials[0].room == pytest.approx(PLAIN + costs, rel=0.1)
