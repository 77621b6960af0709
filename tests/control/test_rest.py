"""While no drafter pays, steps decide nothing, whichever requests come and go."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest

from outrider.control.acceptance import Outcome
from outrider.control.auto import AutoController
from outrider.control.cost import ForwardCost
from outrider.control.evidence import LONGEST_PAUSE, Evidence
from outrider.control.fixed import FixedController, Options
from outrider.control.ledger import CROWD, MOST_GRACE, SHARE, USUAL_GRACE
from outrider.control.plan import Arm, Load
from outrider.control.planner import Settings
from outrider.control.rest import LISTEN, PROMISED
from outrider.core.clock import Times
from outrider.core.params import SamplingParams
from outrider.core.row import Row
from outrider.core.step import Batch, Commit, RowStep
from outrider.core.tree import NO_BUDGET, Budget, DraftTree
from outrider.draft.ngram import Ngram
from outrider.draft.union.joined import Joined
from outrider.drafting.base import TextDrafter
from outrider.testing import make_drafter, make_row

DEPTH, PLAIN, LEVEL = 4, 0.001, 0.0002  # seconds of a plain step, and of a drafted level


def controller(accepted: int) -> AutoController:
    """A drafter that is known well: so many of its tokens are accepted.  It has just been tried."""
    limits = FixedController(Options(), DEPTH, lambda depth: depth, 100)
    costs = ForwardCost({1: PLAIN, 8: 1.2 * PLAIN})
    arm = Arm(("drafter",), DEPTH, lambda depth: depth)
    auto = AutoController(limits, Evidence([arm], costs), Settings(clock=lambda: 0.0))
    for i in range(100):
        auto.evidence.reach[0].learn(Outcome(accepted, accepted < DEPTH))
        auto.evidence.drafting.learn(0, 1, 1 + i % DEPTH, LEVEL * (1 + i % DEPTH))
    auto.evidence.trials[0].room = 0.0
    return auto


def step(auto: AutoController, rows: Sequence[Row], prefill: bool = False) -> Batch:
    """A step of these rows, without drafts."""
    known = [len(row.tokens) if prefill and not row.steps else 1 for row in rows]
    batch = Batch([RowStep(row, len(row.tokens) - n, n) for row, n in zip(rows, known)], prefill)
    for each, budget in zip(batch, auto.budget(batch)):
        each.budget = budget
    auto.trim(batch)
    finish(auto, batch)
    return batch


def finish(auto: AutoController, batch: Batch) -> None:
    for each in batch:
        each.emitted = [*(each.tree.tokens[node] for node in each.accepted), 7]
        each.row.tokens += each.emitted
        each.row.steps += 1
        if len(each.row.tokens) >= each.row.limit:
            each.row.finish_reason = "length"
    auto.learn(Commit(batch), Times(LEVEL * max(each.budget.depth for each in batch), PLAIN, 0.0))


def looks_of(auto: AutoController) -> list[Batch]:
    """Will hold the batches for which something was planned."""
    found, look = [], auto._look

    def counted(batch: Batch, steps: Sequence[RowStep] | None = None) -> None:
        found.append(batch)
        look(batch, steps)

    auto._look = counted  # type: ignore[method-assign]
    return found


def test_a_rest_ends_where_the_batch_allows_drafts_again() -> None:
    auto = controller(DEPTH)
    auto.limits.options = Options(disable_by_batch_size=4)
    rows = [make_row([1] * 5, id=str(i), limit=200) for i in range(5)]
    for _ in range(10):
        step(auto, rows)
    assert auto.rest is not None and auto.rest.longest > 100
    assert any(step(auto, rows[:3])[0].budget != NO_BUDGET for _ in range(3))


def test_a_rest_ends_where_far_fewer_rows_run() -> None:
    auto = controller(0)
    rows = [make_row([1] * 5, id=str(i), limit=200) for i in range(8)]
    step(auto, rows)
    looks = looks_of(auto)
    step(auto, rows[:6])
    assert not looks
    step(auto, rows[:4])
    assert len(looks) == 1


def test_most_steps_of_a_rest_take_no_look_at_their_rows() -> None:
    """Whichever the rows are: it counts how many decode."""
    auto = controller(accepted=0)
    rows = [make_row([1] * 5, id=str(i), limit=500) for i in range(4)]
    step(auto, rows)
    rest = auto.rest
    assert rest is not None
    rest.longest = rest.closed = 1000
    looked, goes_on = [], auto._rests
    auto._rests = lambda *given: (looked.append(1), goes_on(*given))[1]  # type: ignore
    for _ in range(5 * LISTEN):
        step(auto, rows)
    assert auto.rest is rest and len(looked) == 5 + 1
    step(auto, rows[:3])
    step(auto, rows[:3])
    assert len(looked) == 5 + 2


@pytest.mark.parametrize("batch, part", [(CROWD, 1.0), (4 * CROWD, 0.25)])
def test_a_large_batch_may_lose_less(batch: int, part: float) -> None:
    auto = controller(accepted=DEPTH)
    auto.evidence.ledger.loss = 0.0
    load = Load.plain_step(auto.evidence.forward, batch)
    auto.planner.accounts.set_grace(load)
    most = min(part * USUAL_GRACE.total * max(load.plain, USUAL_GRACE.least), MOST_GRACE)
    assert auto.evidence.ledger.grace == pytest.approx(most, rel=0.05)
    auto.evidence.rested(load, [load.plain] * 100, 0.0)
    assert auto.evidence.ledger.earned == pytest.approx(part * SHARE * 100 * load.plain, rel=0.05)


@pytest.mark.parametrize("row, part", [(0.0, 1.0), (0.002, 0.9), (0.03, 0.25)])
def test_a_large_batch_may_lose_as_much_where_further_requests_take_no_time(row: float, part: float) -> None:
    forward = ForwardCost({n: 1 + row * (n - 1) for n in (1, 8, 32, 64)})
    assert Load.plain_step(forward, 4 * CROWD).allowance == pytest.approx(part, rel=0.15)


@pytest.mark.parametrize("count", [1, 8, 16])
def test_a_rest_goes_on_until_the_steps_of_all_rows_have_earned_what_it_lacks(count: int) -> None:
    auto = controller(accepted=0)
    rows = [make_row([1] * 5, id=str(i), limit=5000) for i in range(count)]
    while auto.rest is None:
        step(auto, rows)
    rest, ledger = auto.rest, auto.evidence.ledger
    rest.longest, auto.look_seconds = 3, PLAIN / 10
    ledger.kept = ledger.used = 0.0
    ledger.earned -= ledger.room
    lacks = rest.need + auto.look_seconds + auto.evidence.host - ledger.left
    needed, taken = math.ceil(lacks / (rest.load.loss_share * rest.load.decode)), 0
    while auto.rest is rest:
        step(auto, rows)
        taken += 1
    assert 10 < needed < LONGEST_PAUSE
    assert taken == pytest.approx(needed, abs=3)


def test_the_load_of_a_rest_is_that_of_its_rows() -> None:
    auto = controller(0)
    auto.evidence.forward.per_context = 1e-6
    long, short = (make_row([1] * size, limit=size + 100) for size in (3000, 5))
    step(auto, [long])
    for _ in range(3):
        step(auto, [short], prefill=not short.steps)
    assert auto.rest is not None
    auto.rest.settle()
    assert auto.rest.load.context < 10


class Sure(TextDrafter):
    """Text that is certain."""

    depth = 3

    @dataclass(frozen=True)
    class Options:
        pass

    def after(self, row: Row, ahead: Sequence[int], budget: Budget) -> DraftTree:
        return DraftTree.chain([7] * budget.depth, [0.95] * budget.depth)


def test_requests_come_and_go_without_a_decision() -> None:
    auto = controller(accepted=0)
    first = make_row([1, 2, 3])
    step(auto, [first])
    looks = looks_of(auto)
    for i in range(8):
        short = make_row([1] * 5, id=str(i + 1), limit=8)
        step(auto, [first, short], prefill=True)
        while short.finish_reason is None:
            step(auto, [first, short])
        step(auto, [first])
    assert not looks


@pytest.mark.parametrize("look_seconds", [0.0, 20 * PLAIN])
def test_a_new_request_ends_a_rest_where_drafts_are_expected_to_pay(look_seconds: float) -> None:
    """However long it takes to plan for it."""
    auto = controller(accepted=DEPTH)
    auto.look_seconds = look_seconds
    first = make_row([1, 2, 3], params=SamplingParams(speculate=False))
    step(auto, [first])
    assert auto.rest is not None
    looks = looks_of(auto)
    step(auto, [first])
    assert not looks
    step(auto, [first, make_row([1, 2, 3], id="1")])
    assert looks


def test_nothing_is_planned_for_new_requests_while_nothing_may_be_lost() -> None:
    auto = controller(accepted=DEPTH)
    rows = [make_row([1, 2, 3], id=str(i)) for i in range(5)]
    auto.evidence.ledger.loss, auto.evidence.ledger.used = 1.0, 1.0
    step(auto, rows[:1])
    looks = looks_of(auto)
    for count in (2, 3, 4, 5):
        step(auto, rows[:count])
    assert not looks


def test_steps_that_repeat_are_not_looked_at_while_nothing_may_be_lost() -> None:
    auto = controller(accepted=DEPTH)
    rows = [make_row([1, 2, 3], id=str(i)) for i in range(3)]
    auto.evidence.ledger.loss, auto.evidence.ledger.used = 1.0, 1.0
    step(auto, rows[:1])
    step(auto, rows)  # new ones
    assert auto.rest is not None
    assert auto.rest.repeats(Batch([RowStep(row, len(row.tokens) - 1, 1) for row in rows]))


def considered(auto: AutoController, rows: Sequence[Row]) -> list[Row]:
    """The rows whose drafters are weighed against each other in a step."""
    chosen, choose = [], auto.planner._choose
    auto.planner._choose = lambda row, *given: (chosen.append(row), choose(row, *given))[1]  # type: ignore
    step(auto, rows)
    return chosen


def test_requests_that_are_alike_are_considered_once() -> None:
    auto = controller(accepted=0)
    chosen = considered(auto, [make_row([1, 2, 3], id=str(i)) for i in range(8)])
    assert auto.rest is not None and len(chosen) == 1


def test_no_request_is_considered_while_the_ledger_has_no_room_for_a_draft() -> None:
    auto = controller(accepted=DEPTH)
    auto.evidence.ledger.loss, auto.evidence.ledger.used = 1.0, 1.0
    assert not considered(auto, [make_row([1, 2, 3])]) and auto.rest is not None
    auto.evidence.ledger.loss, auto.rest = 0.0, None
    assert considered(auto, [make_row([1, 2, 3])])


@pytest.mark.parametrize(("look_seconds", "ends"), [(0.0, True), (20 * PLAIN, False)])
def test_a_rest_ends_for_a_promising_request_if_a_plan_may_pay(look_seconds: float, ends: bool) -> None:
    auto, grades = controller(accepted=DEPTH), [0]
    auto.arms = auto.evidence.arms = auto.planner.arms = [auto.arms[0]._replace(grade=lambda row: grades[0])]
    row = make_row([1, 2, 3])
    auto.evidence.ledger.loss, auto.evidence.ledger.used = 1.0, 1.0
    step(auto, [row])
    auto.evidence.ledger.loss, auto.look_seconds, grades[0] = 0.0, look_seconds, 1
    looks = looks_of(auto)
    for _ in range(8):
        step(auto, [row])
    assert bool(looks) == ends


def test_requests_that_have_ended_promise_nothing() -> None:
    """What two promising requests may gain pays for plans, what one may gain does not."""
    auto, grades = controller(accepted=DEPTH), {"0": 0, "1": 1, "2": 1}
    arm = auto.arms[0]._replace(grade=lambda row: grades[row.id])
    auto.arms = auto.evidence.arms = auto.planner.arms = [arm]
    first, *later = (make_row([1, 2, 3], id=str(i), limit=20) for i in range(3))
    auto.evidence.ledger.loss, auto.evidence.ledger.used = 1.0, 1.0
    step(auto, [first])
    rest = auto.rest
    assert rest is not None
    rest.longest = rest.closed = 1000
    auto.evidence.ledger.loss, auto.look_seconds, grades["0"] = 0.0, 1.5 * PROMISED * PLAIN, 1
    while first.finish_reason is None:
        step(auto, [first])
    assert [*rest.promising] == [first]
    step(auto, later[:1], prefill=True)
    assert auto.rest is rest and [*rest.promising] == later[:1]
    step(auto, later, prefill=True)
    assert auto.rest is not rest


def test_the_wait_after_a_failed_trial_counts_its_failure() -> None:
    auto, row = controller(accepted=0), make_row([1, 2, 3])
    auto.evidence.trials[0].room = 1.0
    step(auto, [row])  # plain, to measure its cost
    batch = Batch([RowStep(row, len(row.tokens) - 1, 1)])
    (batch[0].budget,) = auto.budget(batch)
    (planned,) = auto.planner.options.values()
    depth = batch[0].budget.depth
    batch[0].tree = DraftTree.chain([7] * depth, [0.9] * depth)
    auto.trim(batch)
    assert auto.tries[0].plan.exploring and batch[0].tree.size
    finish(auto, batch)
    (option,) = auto.planner.options.values()
    assert auto.vain and option.gain < planned.gain


def test_a_rest_is_in_the_summary_of_every_request() -> None:
    auto = controller(accepted=0)
    rows = [make_row([1] * 5, id=str(i), limit=9 + i) for i in range(3)]
    while any(row.finish_reason is None for row in rows):
        step(auto, [row for row in rows if row.finish_reason is None])
    assert [row.drafting and row.drafting.steps for row in rows] == [{"off": n} for n in (4, 5, 6)]
    assert rows[0].drafting is not None and rows[0].drafting.plain_seconds > 0
    assert auto.evidence.total.plain_seconds == pytest.approx(6 * PLAIN, rel=0.2)
    assert auto.evidence.total.steps == {"off": 15}
    assert not auto.evidence.states


def test_trials_of_all_requests_share_one_account() -> None:
    """Many short requests, none of which was drafted for before: still EXPLORE of the time is for trials."""
    auto, drafted = controller(accepted=0), 0
    for i in range(100):
        row = make_row([1] * 5, id=str(i), limit=25)
        while row.finish_reason is None:
            drafted += step(auto, [row])[0].budget != NO_BUDGET
    assert 1 <= drafted <= 100


def test_forced_text_is_drafted_in_a_rest_that_goes_on() -> None:
    grammar: Any = SimpleNamespace(drafts=True)
    auto, row = controller(accepted=0), make_row([1, 2, 3], grammar=grammar)
    step(auto, [row])
    looks, joined = looks_of(auto), Joined(make_drafter(Ngram), [make_drafter(Sure)])
    for _ in range(5):
        batch = Batch([RowStep(row, len(row.tokens) - 1, 1)])
        batch[0].budget = joined.budgets(batch, auto)[0]
        assert batch[0].budget.nodes == Sure.depth
        batch[0].tree = DraftTree.chain([7] * 3, [0.95] * 3)
        auto.trim(batch)
        assert batch[0].tree.size == 3
        batch[0].accepted = [0, 1, 2]
        finish(auto, batch)
    row.limit = len(row.tokens) + 1
    step(auto, [row])
    assert not looks and row.drafting is not None
    assert row.drafting.steps == {"automatic": 5, "off": 2} and row.drafting.accepted == 15


def test_a_plain_step_stays_plain_beside_forced_text() -> None:
    grammar: Any = SimpleNamespace(drafts=True)
    auto, row = controller(accepted=DEPTH), make_row([1, 2, 3], grammar=grammar)
    joined = Joined(make_drafter(Ngram), [make_drafter(Sure)])
    batch = Batch([RowStep(row, len(row.tokens) - 1, 1)])
    assert joined.budgets(batch, auto) == [NO_BUDGET] and not joined.chains
    finish(auto, batch)
    assert (
        joined.budgets(Batch([RowStep(row, len(row.tokens) - 1, 1)]), auto)[0].nodes >= 3
        and row in joined.chains
    )
