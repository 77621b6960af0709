"""Drafters whose cost hardly depends on the rows that ask: what one row pays, all others pay as well."""

from __future__ import annotations

from statistics import mean

import pytest
from crowd import STEP, Crowd, Stream
from simulated import SECONDS, Source

from outrider.control.acceptance import Outcome, Reach
from outrider.control.auto import AutoController
from outrider.control.cost import DraftCost, ForwardCost
from outrider.control.evidence import Evidence
from outrider.control.fixed import FixedController, Options
from outrider.control.ledger import RESERVE, USED, Ledger
from outrider.control.plan import Arm, Load
from outrider.control.planner import Settings
from outrider.control.prices import Prices
from outrider.core.step import Batch, Commit, RowStep
from outrider.testing import make_row


def source(fixed: float, per_level: float, acceptance: float) -> Source:
    """fixed, per_level: plain steps of one request."""
    return Source(fixed * STEP, per_level * STEP, 1.0, [acceptance], False)


GOOD = [source(0.3, 0.0, 0.75), source(0.1, 0.1, 0.65)]
WEAK = [source(0.3, 0.0, 0.45), source(0.1, 0.1, 0.4)]
USELESS = [source(0.3, 0.0, 0.1), source(0.1, 0.1, 0.05)]
PER_ROW = 0.01 * STEP


def stream(
    sources: list[Source], batch: int, seed: int, debt: float = 0.0, per_row: float = PER_ROW
) -> Stream:
    """debt: seconds that are lost after a few steps, by something else than drafts."""
    made = Stream(Crowd.make(sources, [per_row] * 2, batch, 6 * batch, seed), seed)
    learn, steps = made.controller.learn, 0

    def indebted(commit: Commit, times: object) -> None:
        nonlocal steps
        learn(commit, times)  # type: ignore[arg-type]
        steps += 1
        if steps == 6:
            made.controller.evidence.ledger.loss += debt

    made.controller.learn = indebted  # type: ignore[method-assign]
    return made


@pytest.mark.parametrize("batch, most", [(16, 0.92), (32, 0.98)])
def test_drafts_that_pay_where_all_rows_share_their_cost_are_found(batch: int, most: float) -> None:
    """The best fixed depth takes 0.83 and 0.87 of plain decoding's time."""
    outcomes = [stream(WEAK, batch, seed, per_row=0.0).run() for seed in range(4)]
    assert mean([outcome.time / outcome.plain for outcome in outcomes]) < most


@pytest.mark.parametrize("batch, most", [(4, 0.5), (16, 0.65), (32, 0.92)])
def test_drafts_that_surely_pay_go_on_in_debt(batch: int, most: float) -> None:
    """Much more is lost than may be: plain decoding would take a thousand steps to repay it."""
    outcome = stream(GOOD, batch, 0, debt=0.078).run()
    assert outcome.time < most * outcome.plain


@pytest.mark.parametrize("debt", [0.0, 0.078])
@pytest.mark.parametrize("batch", [4, 16, 32])
def test_useless_drafts_lose_little_in_a_crowd(batch: int, debt: float) -> None:
    """The grace is 20 ms at most, and one step, in which all rows may ask, may go beyond it."""
    outcome = stream(USELESS, batch, 0, debt).run()
    assert outcome.worst_loss < 20 + 1.5 * STEP


@pytest.mark.parametrize("batch", [8, 32])
def test_trials_are_made_by_many_rows(batch: int) -> None:
    """A draft for one row costs nearly as much as one for all, and tells little."""
    made = stream(USELESS, batch, 0)
    made.run()
    asked = [count for _, count, _ in made.asked]
    assert len(asked) > 4
    assert sum(count >= batch // 4 for count in asked) > 0.7 * len(asked)


def prices(alone: float, together: float, batch: int = 16) -> tuple[Prices, Load]:
    """Of a drafter that takes so many plain steps for one row, and for all."""
    arm = Arm(("drafter",), 4, lambda depth: depth)
    evidence = Evidence([arm], ForwardCost({1: SECONDS, 64: SECONDS}))
    evidence.drafting.learn(0, 1, 1, alone * SECONDS)
    evidence.drafting.learn(0, batch, 1, together * SECONDS)
    return Prices([arm], evidence), Load.plain_step(evidence.forward, batch)


@pytest.mark.parametrize("alone, together, rows", [(0.3, 0.3, 8), (0.01, 0.16, 1), (0.1, 0.25, 5)])
def test_a_trial_takes_so_many_rows_that_none_pays_for_the_others(
    alone: float, together: float, rows: int
) -> None:
    made, load = prices(alone, together)
    assert made.trial_rows(0, load) == rows


def test_the_price_of_a_draft_is_a_share_of_what_those_who_ask_pay() -> None:
    made, load = prices(0.3, 0.32)
    all_rows, few = (made.best(0, Reach(), 0.0, load, 1, crowd).cost for crowd in (16, 1))
    assert all_rows == pytest.approx(0.02 * SECONDS) and few == pytest.approx(0.3 * SECONDS)


def test_a_reserve_is_kept_for_a_debt_that_others_have_made() -> None:
    ledger = Ledger(grace=1.0, kept=RESERVE)
    assert ledger.room == pytest.approx(USED - RESERVE)
    ledger.add(10.0, 0.0)
    ledger.add_steps(0.0, 0.0, 0.01)
    assert ledger.room < 0 and ledger.reserve == pytest.approx(RESERVE)
    ledger.add_steps(1.3, 1.0, 0.01)  # drafts have lost more than it
    assert ledger.reserve == pytest.approx(RESERVE - 0.29)
    ledger.add_steps(10.0, 10.0, 0.01)
    assert ledger.reserve == pytest.approx(RESERVE - 0.19)
    ledger.add_steps(0.0, 5.0, 0.01)
    assert ledger.reserve == pytest.approx(RESERVE), "it never grows beyond what is kept"


def test_drafts_that_found_nothing_say_nothing_of_the_tokens_of_others() -> None:
    empty, wrong = Reach(), Reach()
    for i in range(100):
        for reach, nodes in ((empty, 0.0), (wrong, 1.0)):
            reach.learn(Outcome(0, True, nodes) if i % 10 else Outcome(1, False, 1.0))
    assert empty.estimates[0][0] == wrong.estimates[0][0] < 0.15
    assert empty.estimates[0][1] > 0.7 > 0.15 > wrong.estimates[0][1]


@pytest.mark.parametrize("by_level, expected", [((), 2.5), ((0,), 4.0)])
def test_drafts_of_one_depth_do_not_tell_what_others_cost(by_level: tuple[int, ...], expected: float) -> None:
    """Deeper ones are tried, except of a draft model."""
    drafting = DraftCost(1.0, by_level)
    for _ in range(3):
        drafting.learn(0, 1, 2, 1.0)
    assert drafting.expected(0, 1, 8) == pytest.approx(expected, rel=0.01)
    drafting.learn(0, 1, 8, 1.0)
    assert drafting.expected(0, 1, 8) < 1.5


def readers(names: int) -> tuple[AutoController, Batch]:
    """Drafters with models of their own that have left out the prompts of a large batch, which decodes."""
    arms = [
        Arm((str(k),), 4, lambda depth: depth, prefills=True, behind=lambda row: 100) for k in range(names)
    ]
    limits = FixedController(Options(), 4, lambda depth: depth, 100)
    evidence = Evidence(arms, ForwardCost({1: 5 * SECONDS, 64: 6 * SECONDS}))
    evidence.forward.learn_plain(16, 16, 0, evidence.forward.base(16))
    auto = AutoController(limits, evidence, Settings(clock=lambda: 0.0))
    rows = [make_row([1] * 100, id=str(i), limit=300, steps=1) for i in range(16)]
    for row in rows:
        row.left_out = frozenset(arm.name for arm in arms)
    return auto, Batch([RowStep(row, 99, 1) for row in rows])


def test_one_row_shows_what_it_costs_to_compute_a_text() -> None:
    auto, batch = readers(1)
    assert sum(budget.depth > 0 for budget in auto.budget(batch)) == 1
    auto, batch = readers(1)
    auto.evidence.prefills[0].append(1e-7)
    auto.evidence.prefill_cost[0] = 1e-7
    assert sum(budget.depth > 0 for budget in auto.budget(batch)) > 8


def test_a_text_is_computed_for_one_drafter_first() -> None:
    auto, batch = readers(2)
    for k in range(2):
        auto.evidence.prefills[k].append(5e-7)
        auto.evidence.prefill_cost[k] = 5e-7
        for _ in range(30):
            auto.evidence.reach[k].learn(Outcome(3, True))
    auto.evidence.trials[0].room = auto.evidence.trials[1].room = 0.0
    auto.budget(batch)
    assert auto.plans and all(len(plan.options) == 1 for plan in auto.plans.values())


def test_a_drafter_that_left_out_all_prompts_is_considered_soon() -> None:
    auto, batch = readers(1)
    for step in batch:
        step.row.steps, step.start, step.known = 0, 0, 100
    auto.budget(Batch([*batch], prefill=True))
    assert auto.rest is not None and auto.rest.longest < 16
