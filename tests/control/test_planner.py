"""Whether a drafter that computes prompts with a model of its own takes part in a request."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from outrider import LLM, SamplingParams
from outrider.control.acceptance import Outcome
from outrider.control.auto import AutoController
from outrider.control.cost import ForwardCost
from outrider.control.evidence import LONGEST_PAUSE, Evidence
from outrider.control.fixed import FixedController, Options
from outrider.control.ledger import CROWD, Grace
from outrider.control.plan import Arm, Load
from outrider.control.planner import Settings
from outrider.control.waits import closed
from outrider.core.clock import Times
from outrider.core.row import Row
from outrider.core.step import Batch, Commit, RowStep
from outrider.testing import make_row

DEPTH, PROMPT = 4, 200
PLAIN = 0.001  # seconds
STILL = Settings(clock=lambda: 0.0)


def controller(acceptance: float, level: float, prefill: float) -> AutoController:
    """A draft model.  level, prefill: plain steps for a drafted level, and for a token of a prompt."""
    limits = FixedController(Options(), DEPTH, lambda depth: depth, 100)
    arm = Arm(("draft_model",), DEPTH, lambda depth: depth, prefills=True)
    auto = AutoController(limits, Evidence([arm], ForwardCost({1: PLAIN, 8: 1.2 * PLAIN})), STILL)
    reach = auto.evidence.reach[0]
    for i in range(100):
        reach.learn(Outcome(DEPTH if i % 100 < 100 * acceptance else 0, i % 100 >= 100 * acceptance))
        auto.evidence.drafting.learn(0, 1, 1 + i % DEPTH, (1 + i % DEPTH) * level * PLAIN)
    auto.evidence.prefill_cost[0] = prefill * PLAIN
    auto.evidence.prefills[0].extend([prefill * PLAIN] if prefill else [])
    return auto


def test_what_a_worse_drafter_may_lose_does_not_leave_the_better_one_without_room() -> None:
    limits = FixedController(Options(), DEPTH, lambda depth: depth, 100)
    arms = [Arm((name,), DEPTH, lambda depth: depth) for name in ("worse", "better")]
    costs = ForwardCost({1: PLAIN, 8: 3 * PLAIN})  # four nodes of both cost more than may be lost
    auto = AutoController(limits, Evidence(arms, costs), STILL._replace(grace=Grace(total=2.0, least=0.0)))
    for k, accepted in enumerate((2, 4)):
        for depth in range(1, 9):
            auto.evidence.reach[k].learn(Outcome(accepted, accepted < DEPTH))
            auto.evidence.drafting.learn(k, 1, depth, 0.01 * depth * PLAIN)
    batch = Batch([RowStep(make_row([1] * 8, limit=100), 7, 1)])
    auto.load = auto.planner.load = Load.of(batch, auto.evidence.forward)
    (plan,) = auto.planner.plans(batch, auto.load).values()
    assert plan.option(1).depth == DEPTH
    assert all(option.drafter == 1 or option.depth < DEPTH for option in plan.options)


@pytest.mark.parametrize("saved, steps", [(0.0, 2.0), (30.0, 5.0)])
def test_a_request_may_lose_a_part_of_what_drafts_have_saved(saved: float, steps: float) -> None:
    auto = controller(acceptance=0.9, level=0.05, prefill=0.0)
    auto.planner.accounts.grace = Grace(least=0.0)
    auto.evidence.ledger.loss = -saved * PLAIN
    batch = Batch([RowStep(make_row([1] * 8, limit=100), 7, 1)])
    (plan,) = auto.planner.plans(batch, Load.of(batch, auto.evidence.forward)).values()
    assert plan.state.ledger.grace == pytest.approx(steps * PLAIN)


def left_out(auto: AutoController, tokens: int = 50, count: int = 40) -> int:
    """How many of so many new requests leave the drafter out."""
    rows = [make_row([1] * PROMPT, id=str(i), limit=PROMPT + tokens) for i in range(count)]
    for row in rows:
        auto.budget(Batch([RowStep(row, 0, PROMPT)], prefill=True))
    return sum(bool(row.left_out) for row in rows)


def test_a_drafter_that_pays_reads_every_prompt() -> None:
    assert left_out(controller(acceptance=0.9, level=0.05, prefill=0.01)) == 0


def test_a_drafter_that_does_not_pay_reads_few_prompts() -> None:
    """Plain decoding of 50 tokens takes 50 steps, and prefill 200 tokens 10: one in forty would be 0.5 %."""
    assert left_out(controller(acceptance=0.1, level=0.8, prefill=0.05)) > 30


def test_what_a_short_output_saves_does_not_pay_for_a_long_prompt() -> None:
    auto = controller(acceptance=0.5, level=0.1, prefill=0.1)
    assert left_out(auto, tokens=4) > 30 and left_out(auto, tokens=2000) == 0


def answer(auto: AutoController, saved: float) -> None:
    """A request that the drafter read and that drafts have saved so many seconds in."""
    row = make_row([1] * PROMPT, limit=PROMPT + 50)
    auto.evidence.state(row).arms[0].earned = saved
    auto.evidence.close(row, Load.plain_step(auto.evidence.forward, 1))
    auto.evidence.ledger.loss = 0.0  # so that prefill depends on what it was worth


@pytest.mark.parametrize(
    "saved, spared",
    [
        ([0.0], False),
        ([-0.005, 0.0], False),
        ([0.0] * 8, True),
        ([0.05, *[0.0] * 15], True),
        ([0.0] * 8 + [0.05], False),
        ([0.0] * 100 + [0.05], False),
    ],
)
def test_prompts_are_read_until_several_requests_were_not_worth_it(saved: list[float], spared: bool) -> None:
    """What is expected pays.  Reading a prompt takes 2 ms, so that all of them may lose 12."""
    auto = controller(acceptance=0.9, level=0.05, prefill=0.01)
    for seconds in saved:
        answer(auto, seconds)
    assert (left_out(auto) > 30) == spared and (left_out(auto) > 0) == spared


def read_prompt(auto: AutoController, tokens: int, seconds: float) -> None:
    batch = Batch([RowStep(make_row([1] * tokens, limit=2 * PROMPT), 0, tokens)], prefill=True)
    auto.budget(batch)
    batch[0].emitted = [1]
    auto.learn(Commit(batch), Times(seconds, 0.03, 0.0))


@pytest.mark.parametrize("known", [0.01, 0.0])
def test_one_slow_prefill_leaves_no_drafter_out(known: float) -> None:
    """It takes 44 ms instead of 0.2."""
    auto = controller(acceptance=0.9, level=0.05, prefill=known)
    for seconds in (0.044, 0.0002, 0.0002):
        read_prompt(auto, 20, seconds)
    assert auto.evidence.prefill_cost[0] == pytest.approx(0.00001)
    assert left_out(auto) == 0


def test_a_request_that_left_the_drafter_out_tells_nothing_of_its_worth() -> None:
    auto = controller(acceptance=0.9, level=0.05, prefill=0.01)
    row = make_row([1] * PROMPT, limit=PROMPT + 50, left_out=frozenset({"draft_model"}))
    auto.evidence.close(row, Load.plain_step(auto.evidence.forward, 1))
    assert auto.evidence.worth == [0.0]


def test_in_a_large_batch_no_prompt_is_computed_before_a_draft_is_asked_for() -> None:
    """However well it is expected to pay: it catches up when it is asked."""
    auto = controller(acceptance=0.9, level=0.05, prefill=0.01)
    rows = [make_row([1] * PROMPT, id=str(i), limit=2 * PROMPT) for i in range(CROWD + 1)]
    auto.budget(Batch([RowStep(row, 0, PROMPT) for row in rows], prefill=True))
    assert all(row.left_out for row in rows)


def test_a_drafter_of_which_nothing_is_known_reads() -> None:
    limits = FixedController(Options(), DEPTH, lambda depth: depth, 100)
    arms = [Arm(("draft_model",), DEPTH, lambda depth: depth, prefills=True)]
    assert left_out(AutoController(limits, Evidence(arms, ForwardCost({1: PLAIN})), STILL)) == 0


@pytest.mark.parametrize("asked, prefill, reads", [(100, 0.01, 8), (4, 0.01, 2), (4, 0.0, 1)])
def test_prompts_of_many_requests_are_read_by_a_new_drafter_as_far_as_losses_allow(
    asked: int, prefill: float, reads: int
) -> None:
    """A prompt takes 2 ms, 10.8 may be lost, half of it for prompts.  The first one tells their cost."""
    auto = controller(acceptance=0.9, level=0.05, prefill=prefill)
    auto.evidence.reach[0].asked = asked
    rows = [make_row([1] * PROMPT, id=str(i), limit=2 * PROMPT) for i in range(8)]
    auto.budget(Batch([RowStep(row, 0, PROMPT) for row in rows], prefill=True))
    assert sum(not row.left_out for row in rows) == reads
    bets = 0 if asked == 100 else reads
    assert auto.evidence.ledger.loss == pytest.approx(bets * prefill * PLAIN * PROMPT)


@pytest.mark.parametrize(
    "left_out, known, tells", [((), 0.0, True), (("draft_model",), 0.0, False), ((), 0.01, False)]
)
def test_only_the_first_prefill_of_a_drafter_is_taken_in_at_once(
    left_out: tuple[str, ...], known: float, tells: bool
) -> None:
    auto = controller(acceptance=0.9, level=0.05, prefill=known)
    row = make_row([1] * PROMPT, limit=2 * PROMPT, left_out=frozenset(left_out))
    assert auto.prefill_choice.tells_cost(Batch([RowStep(row, 0, PROMPT)], prefill=True)) == tells


def test_prefill_is_no_loss_of_the_row_and_its_cost_is_learned() -> None:
    auto, row = controller(acceptance=0.9, level=0.05, prefill=0.0), make_row([1] * PROMPT, limit=2 * PROMPT)
    batch = Batch([RowStep(row, 0, PROMPT)], prefill=True)
    auto.budget(batch)
    batch[0].emitted = [1]
    auto.learn(Commit(batch), Times(0.02, 0.03, 0.0))
    assert auto.evidence.prefill_cost[0] == pytest.approx(0.02 / PROMPT)
    assert auto.evidence.prefill_seconds == pytest.approx(0.02) and auto.evidence.ledger.loss < 0.001


def test_a_prompt_in_chunks_is_decided_on_once() -> None:
    auto = controller(acceptance=0.1, level=0.8, prefill=0.02)
    row = make_row([1] * PROMPT, limit=PROMPT + 50)
    auto.planner.random.random = lambda: 0.0  # type: ignore[method-assign]
    auto.budget(Batch([RowStep(row, 0, 64)], prefill=True))
    auto.planner.random.random = lambda: 0.99  # type: ignore[method-assign]
    auto.budget(Batch([RowStep(row, 64, 64)], prefill=True))
    assert not row.left_out


def test_a_prompt_that_is_preempted_before_its_first_token_is_decided_on_once() -> None:
    auto = controller(acceptance=0.9, level=0.05, prefill=0.01)
    auto.evidence.reach[0].asked = 4  # hardly tried: prefill counts as loss
    row = make_row([1] * PROMPT, limit=2 * PROMPT)
    for start in (0, 64, 0):
        auto.budget(Batch([RowStep(row, start, 64)], prefill=True))
    assert auto.evidence.ledger.loss == pytest.approx(0.01 * PLAIN * PROMPT)
    row.finish_reason = "length"
    auto.evidence.close(row, auto.load)
    assert not auto.evidence.decided


def test_drafts_beside_a_prompt_are_for_as_many_rows_as_the_step_allows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of the nodes of 40 rows 28 may be added."""
    monkeypatch.setattr("outrider.control.plan.PREFILL_DELAY", 0.25)
    auto = controller(acceptance=0.9, level=0.05, prefill=0.01)
    rows = [make_row([1] * 8, id=str(i), limit=100, steps=1) for i in range(40)]
    prompt = RowStep(make_row([1] * 64, limit=100), 0, 40, emits=False)
    batch = Batch([prompt, *(RowStep(row, 7, 1) for row in rows)], prefill=True)
    asked = sum(budget.nodes > 0 for budget in auto.budget(batch))
    assert auto.load.nodes < 40 and asked > 20


@pytest.mark.parametrize("config", [{"method": "auto"}, {"method": "draft_model", "adaptive": True}])
def test_no_draft_tokens_are_allowed(tiny: Path, config: dict[str, Any]) -> None:
    given = {**config, "model": str(tiny), "num_speculative_tokens": 0}
    llm = LLM(str(tiny), speculative_config=given)
    (output,) = llm.generate({"prompt_token_ids": [5, 6, 7]}, SamplingParams(temperature=0, max_tokens=4))
    assert not output.speculation.drafted


def late_plan(auto: AutoController, lacks: int, remaining: int = 500) -> tuple[Row, bool]:
    """A decoding request that left the draft model out, and whether it is drafted for now."""
    auto.arms[0] = auto.arms[0]._replace(behind=lambda row: lacks)  # type: ignore[index]
    auto.evidence.forward.learn_plain(1, 1, 0, PLAIN)
    row = make_row([1] * PROMPT, limit=PROMPT + remaining, left_out=frozenset({"draft_model"}))
    row.steps = 1
    budgets = auto.budget(Batch([RowStep(row, PROMPT - 1, 1)]))
    return row, budgets[0].nodes > 0


def test_a_drafter_that_was_left_out_joins_when_it_pays() -> None:
    row, drafted = late_plan(controller(acceptance=0.9, level=0.05, prefill=0.01), PROMPT)
    assert drafted and not row.left_out


def test_a_drafter_stays_out_where_reading_the_text_costs_more_than_it_saves() -> None:
    auto = controller(acceptance=0.9, level=0.05, prefill=0.1)
    auto.evidence.trials[0].room = 0.0
    row, drafted = late_plan(auto, PROMPT, remaining=10)
    assert not drafted and row.left_out


@pytest.mark.parametrize("before, after", [(PROMPT, PROMPT // 2), (0, 1)])
def test_a_step_without_room_to_draft_is_no_miss(before: int, after: int) -> None:
    auto, lacks = controller(acceptance=0.9, level=0.05, prefill=0.01), {"now": before}
    auto.arms[0] = auto.arms[0]._replace(behind=lambda row: lacks["now"])  # type: ignore[index]
    auto.evidence.forward.learn_plain(1, 1, 0, PLAIN)
    row, asked = make_row([1] * PROMPT, limit=PROMPT + 500), auto.evidence.reach[0].asked
    batch = Batch([RowStep(row, PROMPT - 1, 1)])
    batch[0].budget = auto.budget(batch)[0]
    lacks["now"] = after
    auto.trim(batch)
    batch[0].emitted, row.steps = [1], 1
    auto.learn(Commit(batch), Times(0.004, PLAIN, 0.0))
    assert batch[0].budget.nodes and auto.evidence.reach[0].asked == asked
    if before:  # the ledger of all requests has what catching up usually takes, the row's has not
        assert auto.evidence.prefill_seconds == pytest.approx(0.004)
        assert auto.evidence.ledger.loss == pytest.approx(0.001)
        assert auto.evidence.states[row].ledger.loss < 0.0001


@pytest.mark.parametrize("lost, joins", [(0.005, True), (0.0093, False)])
def test_a_drafter_joins_late_only_where_the_ledger_has_room(lost: float, joins: bool) -> None:
    """Catching up takes 2 ms, and 10.8 may be lost."""
    auto = controller(acceptance=0.9, level=0.05, prefill=0.01)
    auto.evidence.ledger.add(lost, 0.0)
    auto.evidence.ledger.used = 1.0
    assert late_plan(auto, PROMPT)[1] == joins


def test_the_text_of_a_request_that_the_draft_model_joins_later_is_the_same(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every second request leaves it out at prefill, and others share its pages."""
    from outrider.control.planner import Planner
    from outrider.control.prefill_choice import PrefillChoice

    def every_second(self: PrefillChoice, batch: Batch) -> None:
        for row in batch.rows:
            if not row.steps and int(row.id) % 2:
                row.left_out = frozenset({"draft_model"})

    monkeypatch.setattr(PrefillChoice, "leave_out", every_second)
    monkeypatch.setattr("outrider.control.planner.pays_off", lambda option, load: True)
    monkeypatch.setattr(AutoController, "_begin_rest", lambda self: None)  # a rest depends on the clock
    monkeypatch.setattr("outrider.control.accounts.MOST_GRACE", 1e6)
    monkeypatch.setattr(Planner, "_lacks", lambda self, k, row: 0)
    llm = LLM(str(tiny), max_num_seqs=3, max_num_batched_tokens=16, speculative_config=None)
    draft: dict[str, Any] = {"method": "draft_model", "model": str(tiny), "adaptive": True}
    prompts: list[Any] = [{"prompt_token_ids": [5 + i % 3] * 40 + [9, 8, i]} for i in range(8)]
    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    plain = [output.outputs[0].token_ids for output in llm.generate(prompts, params)]
    adaptive = llm.variant(draft)
    planner = adaptive.engine.controller.planner  # type: ignore[attr-defined]
    planner.accounts.grace = Grace(least=1e3)  # nothing is too dear
    found = adaptive.generate(prompts, params)
    assert [output.outputs[0].token_ids for output in found] == plain
    assert any(output.outputs[0].speculation.accepted for output in found[1::2])
    adaptive.engine.check()


def test_a_plan_that_was_interrupted_does_not_lengthen_the_rests_nor_count_as_loss() -> None:
    """They are so long that planning takes a small part of the time."""
    auto, row = controller(acceptance=0.0, level=0.8, prefill=0.05), make_row([1] * PROMPT)
    ticks = iter([0.0, 0.02])  # another process had the processor
    auto.clock = lambda: next(ticks, 0.02)
    batch = Batch([RowStep(row, PROMPT - 1, 1)])
    auto.budget(batch)
    assert 0 < auto.look_seconds < 1e-4
    auto._begin_rest()
    assert 0 < auto.evidence.host < 1e-3


def crowd(node: float, rows: int = 16) -> tuple[AutoController, Batch]:
    """Requests that decode together, and a drafter of which nothing is known.  node: plain steps of one row
    that a draft node takes.
    """
    limits = FixedController(Options(), DEPTH, lambda depth: depth, 100)
    arm = Arm(("ngram",), DEPTH, lambda depth: depth)
    costs = ForwardCost({1: PLAIN, rows: 2 * PLAIN, 2 * rows: (2 + rows * node) * PLAIN})
    auto = AutoController(limits, Evidence([arm], costs), STILL._replace(grace=Grace(least=0.0)))
    return auto, Batch([RowStep(make_row([1] * 8, id=str(i), limit=100), 7, 1) for i in range(rows)])


@pytest.mark.parametrize("node, tried", [(0.05, True), (0.5, False)])
def test_a_drafter_that_could_not_pay_with_every_token_accepted_is_not_tried(
    node: float, tried: bool
) -> None:
    """A token of a row is worth an eighth of a plain step of one row."""
    auto, batch = crowd(node)
    load = Load.of(batch, auto.evidence.forward)
    assert bool(auto.planner.plans(batch, load)) == tried
    assert (closed(auto.planner) == LONGEST_PAUSE) == (not tried)


def test_a_row_that_ends_soon_does_not_tell_whether_drafts_of_others_could_pay() -> None:
    auto, batch = crowd(0.05)
    auto.evidence.overhead = 3.2 * PLAIN  # one token a draft cannot pay, four can
    load = Load.of(batch, auto.evidence.forward)
    auto.planner.plans(batch, load)
    assert not auto.planner.prices.hopeful(0, load, 1) and auto.planner.prices.hopeful(0, load, DEPTH)


def test_all_requests_together_may_lose_some_plain_steps_of_one() -> None:
    auto, batch = crowd(0.05)
    auto.planner.accounts.grace = Grace(total=100.0, least=0.0)
    ledger = auto.evidence.ledger
    for cost, grace in ((PLAIN, 0.02), (10 * PLAIN, 0.04)):
        auto.evidence.forward.pace = lambda _, cost=cost: cost / PLAIN  # type: ignore[method-assign]
        auto.planner.plans(batch, Load.of(batch, auto.evidence.forward))
        assert ledger.grace == pytest.approx(grace)


def test_plans_that_take_long_hold_for_several_steps_while_drafters_are_new() -> None:
    auto, batch = crowd(0.05)
    now = iter(range(100))
    auto.clock = lambda: 1e-4 * next(now)  # a plan takes 0.1 ms, and a step 2
    auto.budget(batch)
    assert auto.plans and auto.interval == 3
    auto.clock = lambda: 1e-2 * next(now)  # another process had the processor
    auto.stale = True
    auto.budget(batch)
    assert auto.interval == 4
