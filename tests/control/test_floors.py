"""Drafts that end by themselves where what comes next would not pay."""

from __future__ import annotations

import math
import random

import pytest

from outrider.control.acceptance import Calibration, key_of
from outrider.control.auto import AutoController
from outrider.control.choose import Option
from outrider.control.cost import ForwardCost
from outrider.control.evidence import Evidence
from outrider.control.fixed import FixedController, Options
from outrider.control.plan import Arm, Load, Plan, StepRecord, Try
from outrider.control.planner import Settings
from outrider.core.clock import Times
from outrider.core.step import Batch, Commit, RowStep
from outrider.core.tree import NO_BUDGET, Budget, Draft, DraftTree
from outrider.testing import make_row

DEPTH, PLAIN = 8, 0.01
LEVEL, NODE = 0.1, 0.05  # plain steps that a drafted level, and a verified node, take
SURE, UNSURE = 0.95, 0.2


class Bench:
    """A controller, and a drafter one in four of whose tokens is unsure and wrong."""

    def __init__(self, stops: bool) -> None:
        limits = FixedController(Options(), DEPTH, lambda depth: depth, 100)
        arm = Arm(("drafter",), DEPTH, lambda depth: depth, stops=stops)
        costs = ForwardCost({1: PLAIN, 17: (1 + 16 * NODE) * PLAIN})
        self.auto = AutoController(limits, Evidence([arm], costs), Settings(clock=lambda: 0.0))
        self.row, self.stops, self.at = make_row([1, 2, 3], limit=10**6), stops, 0
        self.budgets: list[Budget] = []
        self.seconds, luck = 0.0, random.Random(1)
        self.wrong = [luck.random() < 0.25 for _ in range(10_000)]

    def step(self) -> None:
        batch = Batch([RowStep(self.row, len(self.row.tokens) - 1, 1)])
        (budget,) = self.auto.budget(batch)
        batch[0].budget = budget
        self.budgets.append(budget)
        chain = self._chain(budget)
        batch.take(Draft([chain]))
        self.auto.trim(batch)
        step = batch[0]
        right = 0
        while right < step.tree.size and step.tree.confidence[right] == SURE:
            right += 1
        step.accepted, step.emitted = [*range(right)], [7] * (right + 1)
        self.row.tokens += step.emitted
        self.row.steps += 1
        self.at += right + 1
        drafting, forward = LEVEL * chain.size * PLAIN, (1 + NODE * step.tree.size) * PLAIN
        self.seconds += drafting + forward
        self.auto.learn(Commit(batch), Times(drafting, forward, 0.0))

    def _chain(self, budget: Budget) -> DraftTree:
        confidence: list[float] = []
        while len(confidence) < budget.depth:
            if self.stops and math.prod(confidence) < budget.floor:
                break
            confidence.append(UNSURE if self.wrong[self.at + len(confidence)] else SURE)
        return DraftTree.chain([7] * len(confidence), confidence)


@pytest.fixture
def stopping() -> Bench:
    return Bench(stops=True)


def test_a_drafter_that_stops_is_asked_for_all_that_is_allowed(stopping: Bench) -> None:
    for _ in range(60):
        stopping.step()
    late = [budget for budget in stopping.budgets[30:] if budget != NO_BUDGET]
    assert len(late) > 20 and {budget.depth for budget in late} == {DEPTH}
    assert all(UNSURE < budget.floor < SURE**3 for budget in late)


def test_stopping_early_saves_time(stopping: Bench) -> None:
    other = Bench(stops=False)
    for bench in (stopping, other):
        while bench.at < 1000:
            bench.step()
    assert all(not budget.floor for budget in other.budgets)
    assert stopping.seconds < 0.9 * other.seconds


def test_levels_that_were_not_drafted_cost_nothing_and_are_not_missed(stopping: Bench) -> None:
    for _ in range(120):
        stopping.step()
    reach = stopping.auto.evidence.reach[0]
    assert reach.drafted < 0.8 and reach.per_level < 0.7
    assert min(reach.estimates[0]) > 0.7
    assert stopping.auto.evidence.drafting.line(0, 1)[1] == pytest.approx(LEVEL * PLAIN, rel=0.3)


def test_drafts_of_several_lengths_are_not_charged_with_what_prompts_take(stopping: Bench) -> None:
    """Two rows ask for DEPTH levels, and one draft ends after the first: the cost is of the mean."""
    evidence, batch, tries = stopping.auto.evidence, Batch([], prefill=True), dict[int, Try]()
    for depth in range(1, DEPTH + 1):
        evidence.drafting.learn(0, 2, depth, depth * LEVEL * PLAIN)
    for r, depth in enumerate((1, DEPTH)):
        step = RowStep(row := make_row([1, 2, 3], id=str(r), limit=100), 2, 1)
        step.tree, step.emitted = DraftTree.chain([7] * depth, [UNSURE] * depth), [7]
        option, budget = Option(0, DEPTH, 1.0, PLAIN, PLAIN), Budget(DEPTH, DEPTH, SURE)
        plan = Plan(evidence.state(row), [option], set(), budget, {0: SURE}, PLAIN)
        tries[r] = Try(plan, asked={0: DEPTH}, proposed={0: depth}, ended={0})
        batch.append(step)
    mean, reading = (1 + DEPTH) / 2 * LEVEL * PLAIN, 0.02
    load = Load.plain_step(evidence.forward, 2)
    evidence.learn([StepRecord(batch, load, tries, mean + reading, 2 * PLAIN, {}, False)])
    assert evidence.prefill_seconds == pytest.approx(reading, rel=0.01)


def test_the_exponent_turns_confidence_into_probability() -> None:
    """Tokens are accepted more often than their confidence says: as its square root."""
    calibration = Calibration()
    for confidence in (0.06, 0.31, 0.56, 0.81):
        for i in range(100):
            calibration.learn(key_of(1, 1, confidence), i % 100 < 100 * math.sqrt(confidence))
    assert calibration.exponent(1) == pytest.approx(0.5, abs=0.05)
    assert calibration.exponent(2) == 1.0
