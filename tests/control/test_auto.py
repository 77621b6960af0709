"""What the adaptive controller learns, keeps and forgets, and what a request may ask of it."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest

from outrider import LLM, SamplingParams
from outrider.control.auto import ANCHOR, AutoController
from outrider.control.evidence import Evidence
from outrider.control.fixed import FixedController, Options
from outrider.control.plan import Arm, Load
from outrider.control.planner import Settings
from outrider.control.room import Room
from outrider.core.clock import Times
from outrider.core.row import Row
from outrider.core.step import Batch, Commit, RowStep
from outrider.core.tree import NO_BUDGET, Budget, DraftTree
from outrider.testing import make_row

PROMPT = {"prompt_token_ids": [5, 6, 7, 5, 6, 7, 5, 6]}
DEPTH, ASKED = 4, 5
PLAIN = Times(0.0, 0.001, 0.0)


def controller() -> AutoController:
    """One drafter of chains; drafts are cheap and expected to pay."""
    limits = FixedController(Options(), DEPTH, lambda depth: depth, 100)
    arm = Arm(("drafter",), DEPTH, lambda depth: depth)
    auto = AutoController(limits, Evidence([arm]), Settings(clock=lambda: 0.0))
    auto.evidence.reach[0].asked = ASKED  # its first drafts, which are short, are over
    return auto


def step_of(row: Row) -> Batch:
    return Batch([RowStep(row, len(row.tokens) - 1, 1)])


def budget(auto: AutoController, row: Row) -> tuple[Batch, Budget]:
    """The first step that is no anchor, and its budget."""
    for _ in range(8):
        batch = step_of(row)
        batch[0].budget = auto.budget(batch)[0]
        if not auto.anchored:
            return batch, batch[0].budget
        auto.learn(Commit(batch), PLAIN)
    raise AssertionError("only plain steps")


def test_one_interrupted_step_with_drafts_does_not_use_up_what_may_be_lost() -> None:
    """Also where so many rows were never computed before: plain decoding is interrupted as often."""
    auto, row = controller(), make_row([1, 2, 3])
    batch, asked = budget(auto, row)
    batch[0].tree = DraftTree.chain([7] * asked.depth, [0.99] * asked.depth)
    auto.trim(batch)
    batch[0].emitted = [8]
    auto.learn(Commit(batch), Times(0.0, 50 * PLAIN.forward, 0.0))
    auto.release([row])
    assert 0 < auto.evidence.ledger.loss < 4 * PLAIN.forward


def test_a_single_arm_owns_all_nodes() -> None:
    auto, row = controller(), make_row([1, 2, 3])
    batch, asked = budget(auto, row)
    assert asked.depth > 1
    batch[0].tree = DraftTree.chain([7] * asked.depth, [0.99] * asked.depth)
    batch[0].tree = batch[0].tree._replace(proposers=[2] * asked.depth)
    auto.trim(batch)
    batch[0].accepted = [*range(batch[0].tree.size)]
    batch[0].emitted = [7] * (batch[0].tree.size + 1)
    before = auto.evidence.reach[0].estimates[0][0]
    auto.learn(Commit(batch), PLAIN)
    assert len(batch[0].accepted) > 0 and auto.evidence.reach[0].estimates[0][0] > before


@pytest.mark.parametrize("seconds, often", [(0.0, True), (0.0005, False)])
def test_plans_hold_for_several_steps_where_making_them_is_dear(seconds: float, often: bool) -> None:
    auto, row, now = controller(), make_row([1, 2, 3], limit=1000), 0.0

    def clock() -> float:
        nonlocal now
        now += seconds
        return now

    auto.clock = clock
    for _ in range(40):
        batch, asked = budget(auto, row)
        batch[0].tree = DraftTree.chain([7] * asked.depth, [0.99] * asked.depth)
        auto.trim(batch)
        batch[0].accepted = [*range(batch[0].tree.size)]
        batch[0].emitted = [7] * (batch[0].tree.size + 1)
        row.steps += 1
        auto.learn(Commit(batch), PLAIN)
    assert (auto.interval == 1) == often


def test_plans_hold_while_the_ledger_has_room_for_another_step() -> None:
    """No draft token is right, so every step may lose as much as was planned."""
    auto, row = controller(), make_row([1, 2, 3], limit=1000)
    batch, _ = budget(auto, row)
    (plan,) = auto.plans.values()
    auto.interval, auto.room = 16, Room(1.0, {row: 3.5 * plan.loss})
    for steps in (1, 2, 0):
        batch[0].tree, batch[0].emitted = DraftTree.chain([7], [0.99]), [7]
        auto.trim(batch)
        auto.room.shortfall = -1.0  # nothing else ends the plans
        auto.learn(Commit(batch), PLAIN)
        assert len(auto.log) == steps


def right_step(auto: AutoController, row: Row) -> Batch:
    """A step that has begun, whose one draft token will be right."""
    batch, _ = budget(auto, row)
    batch[0].tree = DraftTree.chain([7], [0.99])
    auto.trim(batch)
    batch[0].accepted, batch[0].emitted = [0], [7, 7]
    return batch


def begun(auto: AutoController, row: Row) -> Batch:
    """A step up to the launch of its forward, with one draft token if the plans allow it."""
    batch = step_of(row)
    batch[0].budget = auto.budget(batch)[0]
    if batch[0].budget.depth:
        batch[0].tree = DraftTree.chain([7], [0.99])
    auto.trim(batch)
    return batch


def step_on_a_device(auto: AutoController, row: Row, right: bool = True, last: bool = False) -> Batch:
    """A step whose outcome is learned after that of the one before it was taken in."""
    batch = begun(auto, row)
    auto.settle()
    drafted = bool(batch[0].tree.tokens)
    batch[0].accepted = [0] if right and drafted else []
    batch[0].emitted = [7] * (1 + len(batch[0].accepted))
    row.steps += 1
    row.finish_reason = "stop" if last else None
    auto.learn(Commit(batch), PLAIN._replace(propose=0.0005 if drafted and not right else 0.0))
    return batch


def on_a_device() -> tuple[AutoController, Row]:
    auto, ticks = controller(), itertools.count()
    auto.settles, auto.clock = True, lambda: 1e-7 * next(ticks)
    return auto, make_row([1, 2, 3], limit=1000)


def test_on_a_device_outcomes_are_taken_in_while_the_next_step_is_computed() -> None:
    """That step has the plans of before, those after it have new ones, and the work is no loss."""
    auto, row = on_a_device()
    while not (auto.due and auto.plans and not auto.stale):
        step_on_a_device(auto, row)
    (before,), log = auto.plans.values(), len(auto.log)
    batch = begun(auto, row)
    batch[0].accepted, batch[0].emitted = [0], [7, 7]
    assert [*auto.plans.values()] == [before] and len(auto.log) == log > 0
    auto.settle()
    (after,) = auto.plans.values()
    assert after is not before and not auto.log and not auto.due and not auto.stale
    assert auto.evidence.host == auto.looked == 0
    auto.learn(Commit(batch), PLAIN)
    assert auto.room.of_row[row] < after.state.ledger.room + auto.load.token


def test_on_a_device_no_step_waits_for_a_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """Until there is one, steps are plain; where none pays, a rest begins."""
    auto, row = on_a_device()
    waiting = [True]
    plans, settle = auto.planner.plans, auto.settle

    def planned(*args: Any) -> Any:
        assert not waiting[0]
        return plans(*args)

    def settled() -> None:
        waiting[0] = False
        settle()
        waiting[0] = True

    monkeypatch.setattr(auto.planner, "plans", planned)
    monkeypatch.setattr(auto, "settle", settled)
    drafted = [bool(step_on_a_device(auto, row, right=False)[0].tree.tokens) for _ in range(200)]
    assert not drafted[0] and any(drafted)
    assert auto.rest is not None and not auto.due, "a rest makes no plans"


@pytest.mark.parametrize("chunks", [2, 3])
def test_on_a_device_a_chunk_that_emits_nothing_begins_no_rest(chunks: int) -> None:
    auto, _ = on_a_device()
    row = make_row([1] * 4 * chunks, limit=1000)
    for chunk in range(chunks):
        batch = Batch([RowStep(row, 4 * chunk, 4)], prefill=True)
        batch[0].budget = auto.budget(batch)[0]
        auto.trim(batch)
        auto.settle()
        batch[0].emitted = [7] if batch[0].emits else []
        auto.learn(Commit(batch), PLAIN)
        assert auto.rest is None
    row.steps = 1
    assert [step_on_a_device(auto, row)[0].tree.tokens for _ in range(8)][-1]


def test_on_a_device_the_last_step_of_a_row_is_taken_in_before_it_leaves() -> None:
    auto, row = on_a_device()
    while not step_on_a_device(auto, row)[0].tree.tokens:
        pass
    step_on_a_device(auto, row, last=True)
    assert auto.ended and row in auto.evidence.states
    auto.settle(computes=False)
    assert not auto.ended and not auto.log and row not in auto.evidence.states
    assert row.drafting is not None and sum(row.drafting.steps.values()) == row.steps


def test_on_a_device_a_chunk_behind_the_last_decoding_row_begins_no_rest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """No draft paid for that row, which is found out while its last step is computed."""
    auto, row = on_a_device()
    monkeypatch.setattr(auto.planner, "plans", lambda *_: {})
    step_on_a_device(auto, row, last=True)
    assert auto.vain
    prompt = make_row([1] * 8, limit=1000)
    batch = Batch([RowStep(prompt, 0, 4, emits=False)], prefill=True)
    assert [budget.depth for budget in auto.budget(batch)] == [0] and auto.rest is None


def test_on_a_device_a_row_that_joins_takes_nothing_from_those_that_have_ended() -> None:
    auto, row = on_a_device()
    while not step_on_a_device(auto, row)[0].tree.tokens:
        pass
    step_on_a_device(auto, row, last=True)
    auto.evidence.drop_ended()  # as when another row joins
    auto.settle(computes=False)
    assert row.drafting is not None and not auto.evidence.states
    assert row.drafting.steps["drafter"] > 0 and sum(row.drafting.steps.values()) == row.steps


def test_without_a_device_outcomes_are_taken_in_at_once() -> None:
    auto, row = controller(), make_row([1, 2, 3], limit=1000)
    for _ in range(20):
        auto.learn(Commit(right_step(auto, row)), PLAIN)
        assert not auto.due and len(auto.log) < auto.interval


def test_a_budget_that_was_cut_to_nothing_is_no_miss() -> None:
    auto, row = controller(), make_row([1, 2, 3])
    batch, _ = budget(auto, row)
    batch[0].budget = NO_BUDGET
    auto.trim(batch)
    auto.learn(Commit(batch), PLAIN)
    assert auto.evidence.reach[0].asked == ASKED


def test_rows_with_forced_text_do_not_change_the_estimates() -> None:
    auto, row = controller(), make_row([1, 2, 3])
    batch, _ = budget(auto, row)
    assert auto.forced(0)
    batch[0].tree = DraftTree.chain([7, 7], [0.95] * 2)
    auto.trim(batch)
    assert batch[0].tree.size == 2
    auto.learn(Commit(batch), PLAIN)
    assert auto.evidence.reach[0].asked == ASKED


def test_a_plain_step_that_is_due_refuses_forced_text() -> None:
    auto = controller()
    batch = step_of(make_row([1, 2, 3]))
    assert auto.budget(batch) == [NO_BUDGET] and not auto.forced(0)


def test_a_step_with_prompt_tokens_is_no_anchor() -> None:
    """Its time does not tell the cost of a plain step, and other rows would lose their drafts."""
    auto, row = controller(), make_row([1, 2, 3])
    batch, _ = budget(auto, row)
    auto.learn(Commit(batch), PLAIN)
    auto.evidence.surprises = 4
    auto.load = Load(auto.evidence.forward, batch=1, rows=3)
    assert not auto._anchor()
    auto.load = Load(auto.evidence.forward, batch=1, rows=1)
    assert auto._anchor()


def test_plain_steps_without_number_leave_the_distance_between_anchors_bounded() -> None:
    auto, batch = controller(), step_of(make_row([1, 2, 3]))
    auto.evidence.forward.plain_steps[1] = 10**12
    auto.budget(batch)
    assert not auto.anchored
    auto.since_plain = ANCHOR
    auto.budget(batch)
    assert auto.anchored


def test_states_of_ended_rows_go_when_a_new_row_comes() -> None:
    """However the old one ended: a row that waits or whose step failed is never announced."""
    auto, old, new = controller(), make_row([1, 2, 3]), make_row([1, 2, 3], id="1")
    budget(auto, old)
    old.finish_reason = "abort"
    budget(auto, new)
    assert list(auto.evidence.states) == [new]


@pytest.mark.parametrize("speculate", [True, False])
def test_a_request_limits_its_own_drafts(speculate: bool) -> None:
    row = make_row([1, 2, 3], params=SamplingParams(max_tokens=9, max_draft_tokens=2, speculate=speculate))
    assert row.draft_depth == (2 if speculate else 0)
    batch = step_of(row)
    auto = controller()
    auto.since_plain, auto.evidence.forward.plain_steps[1] = 0, 9
    assert auto.budget(batch)[0].depth == row.draft_depth
    assert auto.limits.budget(batch)[0].depth == row.draft_depth


def test_every_step_up_to_the_last_one_is_in_the_summary(tiny: Path) -> None:
    llm = LLM(str(tiny), speculative_config={"method": "ngram", "adaptive": True})
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    output = llm.generate(PROMPT, params)[0].outputs[0]
    assert output.drafting is not None
    assert (
        sum(output.drafting.steps.values())
        == output.speculation.steps
        == len(output.token_ids) - output.drafting.accepted
    )
    assert output.drafting.accepted == output.speculation.accepted


def test_an_output_keeps_the_summary_of_its_time(tiny: Path) -> None:
    llm = LLM(str(tiny), speculative_config={"method": "ngram", "adaptive": True})
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    seen = [output.outputs[0].drafting for output in llm.stream(PROMPT, params)]
    counts = [sum(drafting.steps.values()) for drafting in seen if drafting is not None]
    assert len(set(counts)) > 1 and counts == sorted(counts)
