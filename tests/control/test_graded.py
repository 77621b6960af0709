"""What a drafter tells of a draft before it is asked counts by the acceptance that such drafts had."""

from __future__ import annotations

from pathlib import Path

import pytest

from outrider import LLM, SamplingParams
from outrider.control.acceptance import Outcome, Reach
from outrider.control.auto import AutoController
from outrider.control.cost import ForwardCost
from outrider.control.evidence import Evidence
from outrider.control.fixed import FixedController, Options
from outrider.control.plan import Arm
from outrider.control.planner import Settings
from outrider.control.rest import LISTEN
from outrider.core.clock import Times
from outrider.core.row import Row
from outrider.core.step import Batch, Commit, RowStep
from outrider.core.tree import DraftTree
from outrider.testing import make_row

DEPTH, PLAIN, LEVEL = 8, 0.001, 0.00002  # seconds of a plain step, and of a drafted level
GRADES: dict[str, int] = {}


@pytest.fixture
def auto() -> AutoController:
    """A drafter that has failed often, and is expected to fail for rows of which it tells nothing."""
    limits = FixedController(Options(), DEPTH, lambda depth: depth, 100)
    arm = Arm(("drafter",), DEPTH, lambda depth: depth, grade=lambda row: GRADES.get(row.id, 0))
    costs = ForwardCost({1: PLAIN, 16: 2 * PLAIN})
    made = AutoController(limits, Evidence([arm], costs), Settings(clock=lambda: 0.0))
    for i in range(100):
        made.evidence.reach[0].learn(Outcome(0, True))
        made.evidence.drafting.learn(0, 1, 1 + i % DEPTH, LEVEL * (1 + i % DEPTH))
    made.evidence.trials[0].room = 0.0
    made.evidence.forward.plain_steps[1] = 10**6  # their cost is known, so that none is due
    GRADES.clear()
    return made


def step(auto: AutoController, rows: list[Row], right: bool) -> list[int]:
    """A step whose drafts are all right, or all wrong.  Returns the depths of the budgets."""
    new = not all(row.steps for row in rows)
    batch = Batch([RowStep(row, len(row.tokens) - 1, 1) for row in rows], prefill=new)
    for each, budget in zip(batch, auto.budget(batch)):
        each.budget = budget
        each.tree = DraftTree.chain([7] * budget.depth, [1.0] * budget.depth)
    depths = [each.budget.depth for each in batch]
    auto.trim(batch)
    for each in batch:
        each.accepted = [*range(each.tree.size)] if right else []
        each.emitted = [7] * (len(each.accepted) + 1)
        each.row.tokens += each.emitted
        each.row.steps += 1
    nodes = sum(each.tree.size for each in batch)
    auto.learn(Commit(batch), Times(LEVEL * max(depths), PLAIN * (1 + nodes / 15), 0.0))
    return depths


def rows(count: int, name: str = "row") -> list[Row]:
    return [make_row([1] * 5, id=f"{name} {i}", limit=1000) for i in range(count)]


def test_a_new_row_of_which_much_is_known_ends_a_rest_at_once(auto: AutoController) -> None:
    (old,) = rows(1)
    assert not any(step(auto, [old], True)[0] for _ in range(10)) and auto.rest is not None
    (new,) = rows(1, "new")
    GRADES["new 0"] = 1
    assert step(auto, [new], True) == [DEPTH]


def test_what_becomes_known_within_a_text_ends_a_rest_soon(auto: AutoController) -> None:
    (row,) = rows(1)
    for _ in range(5):
        step(auto, [row], True)
    GRADES["row 0"] = 1
    assert any(step(auto, [row], True)[0] for _ in range(LISTEN + 2))


def test_a_grade_that_falls_and_rises_in_a_rest_is_considered_again(
    auto: AutoController, monkeypatch: pytest.MonkeyPatch
) -> None:
    considered = []
    monkeypatch.setattr("outrider.control.rest.may_pay", lambda *given: considered.append(given))
    (row,) = rows(1)
    while auto.rest is None:
        step(auto, [row], False)
    rest, ledger = auto.rest, auto.evidence.ledger
    rest.longest, rest.need, ledger.loss = 8 * LISTEN, 0.0, -1.0  # it is long, and there is room for a plan
    for grade in (1, 0, 1):
        GRADES["row 0"] = grade
        for _ in range(LISTEN):
            step(auto, [row], False)
    assert auto.rest is rest and len(considered) == 2


def test_drafts_of_a_grade_deepen_over_requests(auto: AutoController) -> None:
    """The first ones are no short trials.  Rows of no grade are not drafted for."""
    deepest = []
    for i, row in enumerate(rows(4)):
        GRADES[row.id] = 2
        deepest.append([step(auto, [row], True)[0] for _ in range(3)])
        assert i == 0 or deepest[i][1] >= deepest[i - 1][1]
    assert deepest[0][0] > 1 and deepest[3] == [DEPTH] * 3
    auto.evidence.trials[0].room, others = 0.0, rows(2, "other")
    assert not any(sum(step(auto, others, True)) for _ in range(5))


def test_what_fails_is_given_up_over_all_requests_within_the_ledger(auto: AutoController) -> None:
    drafted = []
    for row in rows(30):
        GRADES[row.id] = 1
        drafted.append(sum(step(auto, [row], False)[0] > 0 for _ in range(20)))
        assert auto.evidence.ledger.room > -PLAIN
    assert drafted[0] > 2 and max(drafted[10:]) <= 2


def test_a_grade_that_is_known_to_fail_ends_no_rest(auto: AutoController) -> None:
    auto.evidence.graded.clear()
    auto.evidence.graded[0, 1] = auto.evidence.reach[0]
    (row,) = rows(1)
    looks, look = [], auto._look
    auto._look = lambda batch: (looks.append(batch), look(batch))[1]  # type: ignore[method-assign]
    for i in range(14):
        GRADES[row.id] = int(i > 3)
        step(auto, [row], False)
    assert len(looks) == 1


@pytest.mark.parametrize("failures", [0, 10])
def test_plans_leave_the_room_that_a_promising_draft_needs(auto: AutoController, failures: int) -> None:
    """Nothing may be lost any more, and a plan costs what 20 steps earn: drafts begin again all the same.

    failures: drafts of each grade that were wrong before.
    """
    now = iter(range(10**6))
    auto.clock, auto.evidence.ledger.loss = (lambda: next(now) * PLAIN / 5), 1.0
    step(auto, rows(1), True)
    ledger, accepted = auto.evidence.ledger, 0
    ledger.loss = 0.0
    ledger.loss = ledger.room
    for grade in range(1, 5):
        auto.evidence.graded[0, grade] = Reach()
        for _ in range(failures):
            auto.evidence.graded[0, grade].learn(Outcome(0, True))
    for row in rows(20, "promising"):
        for i in range(32):
            GRADES[row.id] = 1 + i // LISTEN
            accepted += step(auto, [row], True)[0]
    assert accepted > 200


def test_a_repeated_request_is_drafted_at_once(tiny: Path) -> None:
    """The same prompt four times, greedy: the tokens of plain decoding, in a fraction of the steps.

    Of other requests the drafter is known to fail.
    """
    llm = LLM(str(tiny), max_num_seqs=1, speculative_config="auto")
    auto, learn = llm.engine.controller, llm.engine.controller.learn
    assert isinstance(auto, AutoController)
    auto.clock, auto.evidence.forward = (lambda: 0.0), ForwardCost({1: PLAIN, 16: 2 * PLAIN})
    auto.evidence.trials[0].room = 0.0
    for _ in range(100):
        auto.evidence.reach[0].learn(Outcome(0, True))

    def learned(commit: Commit, times: Times) -> None:
        nodes = sum(len(each.tree.tokens) for each in commit.batch)
        learn(commit, Times(LEVEL if nodes else 0.0, PLAIN * (1 + nodes / 15), 0.0))

    auto.learn = learned  # type: ignore[method-assign]
    params = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True)
    prompt = {"prompt_token_ids": [*range(20, 60)]}
    plain = LLM(str(tiny), speculative_config=None).generate(prompt, params)[0].outputs[0]
    found = [llm.generate(prompt, params)[0].outputs[0] for _ in range(4)]
    assert [each.token_ids for each in found] == [plain.token_ids] * 4
    per_step = [each.speculation.tokens_per_step for each in found]
    assert per_step[1] > 1.5 * per_step[0] and per_step[3] >= 3
