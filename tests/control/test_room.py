"""What the plans expect, and when outcomes surprise."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from outrider.control import choose
from outrider.control.auto import AutoController
from outrider.control.choose import Option
from outrider.control.cost import ForwardCost
from outrider.control.evidence import Evidence
from outrider.control.fixed import FixedController, Options
from outrider.control.mix import MixAsks
from outrider.control.plan import Arm, Load, Plan, Try
from outrider.control.room import Room
from outrider.core.step import Batch, RowStep
from outrider.core.tree import Budget, Draft, DraftTree
from outrider.testing import make_row

DEPTH, ROWS = 4, 50
GAINS = 0.8, 2.0  # of the cheaper drafter, and of the other one alone


def asked() -> tuple[Batch, dict[int, Try], float]:
    """A step that asks both drafters of a mix for all rows, and what they gain together for each of them."""
    limits = FixedController(Options(), DEPTH, lambda depth: depth, 100)
    arms = [Arm((name,), DEPTH, lambda depth: depth) for name in ("cheap", "dear")]
    auto = AutoController(limits, Evidence(arms, ForwardCost({1: 0.001, 64: 0.002})))
    state: Any = SimpleNamespace(ledger=SimpleNamespace(room=1e9), calibration=auto.evidence.calibration)
    options = [Option(k, DEPTH, gain, 0.0, 0.0) for k, gain in enumerate(GAINS)]
    plan = Plan(state, options, {0, 1}, Budget(DEPTH, 2 * DEPTH), {0: 0.0, 1: 0.0}, 0.0, sure=True)
    batch = Batch([RowStep(make_row([1, 2, 3], id=str(i)), 2, 1) for i in range(ROWS)])
    for step in batch:
        step.budget = plan.budget
    tries = {r: Try(plan) for r in range(ROWS)}
    asks = MixAsks(auto.planner, Load.of(batch, auto.evidence.forward), tries, lambda: 0.0)
    asks.budgets_of(0, batch, {})
    tree = DraftTree.chain([7] * DEPTH, [0.5] * DEPTH)
    asks.budgets_of(1, batch, {0: Draft([tree] * ROWS)})
    missed = choose.missed_by([(1, tree)], auto.evidence.calibration)
    assert 0.2 < missed < 0.8
    return batch, tries, GAINS[0] + missed * GAINS[1]


@pytest.mark.parametrize(("share", "surprising"), [(1.0, False), (0.0, True)])
def test_a_mix_is_expected_to_gain_less_than_its_drafters_alone(share: float, surprising: bool) -> None:
    """The second one gains only where the first is wrong: plans were made again after nearly every step."""
    batch, tries, gain = asked()
    room = Room(of_all=1e9, reserve=1e9, of_row=dict.fromkeys(batch.rows, 1e9))
    total, right = 0, 0.0
    for _ in range(16):
        for step in batch:
            right += share * gain
            step.accepted = list(range(int(right) - total))
            total = int(right)
        room.enter(batch, tries, 1.0)
    assert room.surprising == surprising


def test_what_a_drafter_could_not_draft_is_not_expected() -> None:
    batch, tries, _ = asked()
    arm = Arm(("late",), DEPTH, lambda depth: depth, prefills=True, behind=lambda row: 9)
    for step, tried in zip(batch, tries.values()):
        step.accepted = []
        tried.catch_up(step.row, [arm, arm])
    room = Room(of_all=1e9, reserve=1e9, of_row=dict.fromkeys(batch.rows, 1e9))
    room.enter(batch, tries, 1.0)
    assert not room.planned and not room.surprising
