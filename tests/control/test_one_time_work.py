"""What the adaptive controller makes of work that is done once, such as recording the graph of a draft."""

from __future__ import annotations

import threading

import pytest

from outrider.control.auto import AutoController
from outrider.control.choose import Option
from outrider.control.evidence import Evidence
from outrider.control.fixed import FixedController, Options
from outrider.control.ledger import MOST_ONCE
from outrider.control.plan import Arm, Load, Plan, StepRecord, Try
from outrider.control.planner import Settings
from outrider.core import clock
from outrider.core.clock import Times
from outrider.core.step import Batch, Commit, RowStep
from outrider.core.tree import Budget, DraftTree
from outrider.testing import make_row

DEPTH, PLAIN = 4, 0.001  # seconds of a plain step
DRAFT = 0.2 * PLAIN


def made() -> AutoController:
    limits = FixedController(Options(), DEPTH, lambda depth: depth, 100)
    arm = Arm(("drafter",), DEPTH, lambda depth: depth)
    auto = AutoController(limits, Evidence([arm]), Settings(clock=lambda: 0.0))
    auto.evidence.reach[0].asked = 5  # its first drafts, which are short, are over
    return auto


def take_step(auto: AutoController, right: bool, once: float, times: Times) -> bool:
    """One step of a request with `once` seconds of one-time work.  Returns whether it had a draft."""
    batch = Batch([RowStep(ROW, len(ROW.tokens) - 1, 1)])
    asked = batch[0].budget = auto.budget(batch)[0]
    clock.add_one_time(once)
    if asked.depth:
        batch[0].tree = DraftTree.chain([7] * asked.depth, [0.99] * asked.depth)
    auto.trim(batch)
    size = batch[0].tree.size
    batch[0].accepted, batch[0].emitted = [*range(size if right else 0)], [7] * (1 + size * right)
    ROW.steps += 1
    auto.learn(Commit(batch), times if asked.depth else Times(0.0, PLAIN, 0.0))
    return asked.depth > 0


ROW = make_row([1, 2, 3], limit=1000)


def first_draft(once: float, times: Times) -> AutoController:
    """A controller after its first step with a draft, of which no token was right."""
    auto = made()
    while not take_step(auto, False, 0.0 if not auto.evidence.forward.plain_steps[1] else once, times):
        pass
    auto.release([ROW])
    return auto


def test_one_time_work_of_drafts_is_in_the_ledger_once() -> None:
    usual = first_draft(0.0, Times(DRAFT, PLAIN, 0.0)).evidence
    found = first_draft(1.5 * PLAIN, Times(DRAFT, PLAIN, 0.0)).evidence
    assert found.ledger.loss - usual.ledger.loss == pytest.approx(1.5 * PLAIN, rel=0.1)
    assert found.total.seconds - usual.total.seconds == pytest.approx(1.5 * PLAIN, rel=0.1)


def test_one_step_with_one_time_work_does_not_use_up_the_ledger() -> None:
    """The summary has all of it."""
    found = first_draft(5.0, Times(DRAFT, PLAIN, 0.0)).evidence
    assert found.ledger.loss <= (MOST_ONCE + 1) * PLAIN and found.total.seconds > 5.0


def test_the_first_drafts_after_a_rest_teach_no_cost() -> None:
    """Their code and data have left the caches: neither they nor the forward take as long again."""
    auto = made()
    auto.evidence.drafting.learn(0, 1, 4, DRAFT)
    for _ in range(30):  # its drafts fail: then it rests
        take_step(auto, False, 0.0, Times(DRAFT, PLAIN, 0.0))
    assert auto.rest is not None
    evidence = auto.evidence
    before = evidence.drafting.expected(0, 1, 1), evidence.forward.base(2)
    while not take_step(auto, True, 0.0, Times(10 * DRAFT, 3 * PLAIN, 0.0)):
        pass
    auto.release([ROW])
    assert (evidence.drafting.expected(0, 1, 1), evidence.forward.base(2)) == pytest.approx(before, rel=0.05)
    assert evidence.overhead == 0.0


def test_a_step_with_one_time_work_teaches_no_cost() -> None:
    """Its drafts were launched, or recorded: neither the draft nor the forward takes as long again."""
    auto = made()
    before = auto.evidence.drafting.expected(0, 1, DEPTH), auto.evidence.forward.base(1 + DEPTH)
    auto = first_draft(3 * PLAIN, Times(9 * PLAIN, 9 * PLAIN, 0.0))
    assert (auto.evidence.drafting.expected(0, 1, DEPTH), auto.evidence.forward.base(1 + DEPTH)) == before


def test_one_time_work_without_drafts_is_not_lost() -> None:
    """A graph of a plain step: plain decoding records it, too."""
    auto = made()
    assert not take_step(auto, False, 3 * PLAIN, Times(0.0, PLAIN, 0.0)), "the first step is plain"
    auto.release([ROW])
    assert auto.evidence.ledger.loss == pytest.approx(0.0, abs=0.01 * PLAIN)


def test_one_time_work_before_a_step_or_of_another_controller_does_not_count() -> None:
    clock.add_one_time(5.0)
    since = clock.one_time()
    clock.add_one_time(1.0)
    assert clock.take_one_time(since) == pytest.approx(1.0)
    assert clock.take_one_time(since) == 0.0


def test_one_time_work_of_another_thread_is_not_of_a_step() -> None:
    """A step that was begun by one thread, and is completed by another one."""
    clock.add_one_time(5.0)
    since, taken = clock.one_time(), list[float]()
    other = threading.Thread(target=lambda: taken.append(clock.take_one_time(since)))
    other.start()
    other.join()
    assert taken == [0.0]


def test_catching_up_is_charged_in_a_step_with_one_time_work() -> None:
    auto = made()
    auto.evidence.prefill_cost[0] = 0.01 * PLAIN
    plan = Plan(
        auto.evidence.state(ROW), [Option(0, 1, 0.5, PLAIN, PLAIN)], {0}, Budget(1, 1), {0: 0.0}, PLAIN
    )
    step = RowStep(ROW, len(ROW.tokens) - 1, 1)
    step.emitted, load = [7], Load.plain_step(auto.evidence.forward, 1)
    found = []
    for late in ({}, {0: 100}):
        auto.evidence.ledger.loss, trials = 0.0, auto.evidence.trials[0].room
        record = StepRecord(Batch([step]), load, {0: Try(plan, late=late)}, 0.0, load.plain, {}, False, PLAIN)
        auto.evidence.learn([record])
        found.append((auto.evidence.ledger.loss, trials - auto.evidence.trials[0].room))
    assert found[1][0] - found[0][0] == pytest.approx(PLAIN)
    assert found[1][1] - found[0][1] == pytest.approx(PLAIN)
