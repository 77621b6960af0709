"""What was learned of drafters is there at the next start."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from outrider import LLM, SamplingParams
from outrider.checkpoints.hub import GROWN
from outrider.control.acceptance import FIRST_GRADED, Outcome, Reach, bin_of, key_of
from outrider.control.auto import AutoController
from outrider.control.cost import ForwardCost
from outrider.control.evidence import Evidence
from outrider.control.fixed import FixedController, Options
from outrider.control.ledger import KNOWN_GRACE, MOST_KEPT, RESERVE, USED, USUAL_GRACE
from outrider.control.memory import MOST, learned
from outrider.control.plan import Arm
from outrider.core.clock import Times
from outrider.core.step import Batch, Commit, RowStep
from outrider.engine.stored import StoredJson
from outrider.testing import make_row

KEY = key_of(1, 2, 0.9)


def kept() -> Any:
    """Of one drafter, through JSON."""
    made = learned(None, 1, 1e-3)
    for accepted in (True, True, True, False) * 100:
        made.calibration.learn(KEY, accepted)
        made.reach[0].learn(Outcome(2, True))
    made.drafting.learn(0, 1, 4, 0.002)
    made.prefill_cost[0] = 1e-5
    made.graded[0, 2] = Reach(expected=FIRST_GRADED)
    for _ in range(40):
        made.graded[0, 2].learn(Outcome(1, True))
    return json.loads(json.dumps(made.written()))


def test_acceptance_and_costs_are_those_that_were_learned() -> None:
    found = learned(kept(), 1, 1e-3)
    assert found.calibration.probability(KEY) == pytest.approx(0.75, abs=0.03)
    means = found.reach[0].estimates[0]
    assert means[0] > 0.9 and means[1] > 0.9 and means[2] < 0.1
    assert found.drafting.expected(0, 1, 4) == pytest.approx(0.002, rel=0.05) and found.prefill_cost == [1e-5]
    means = found.graded[0, 2].estimates[0]
    assert found.graded[0, 2].asked == 40 and means[0] > 0.9 > 0.1 > means[1]


def test_old_evidence_gives_way_to_new() -> None:
    found = learned(kept(), 1, 1e-3)
    assert sum(found.calibration.cells[bin_of(KEY)]) == pytest.approx(MOST)
    for _ in range(int(MOST)):
        found.reach[0].learn(Outcome(0, True))
    assert found.reach[0].estimates[0][0] < 0.6


@pytest.mark.parametrize(
    "change",
    [
        {"reach": []},
        {"reach": [{"hits": [1.0]}]},
        {"reach": [{**kept()["reach"][0], "drafted": 0.0}]},
        {"calibration": [[1, -1.0, 2.0]]},
        {"calibration": [["x", 1.0, 2.0]]},
        {"costs": [[0, 0, float("nan"), 1, 1, 1, 1]]},
        {"costs": 7},
        {"costs": [[0, 0, 1, 0, 1, 0, 1]]},
        {"prefill_cost": [10**400]},
        {"prefill_cost": [1e-5, 1e-5]},
        {"saved": -1.0},
        {"graded": [[0, 1, {}]]},
    ],
)
def test_what_is_broken_counts_as_nothing(change: dict[str, Any], caplog: pytest.LogCaptureFixture) -> None:
    learned(None, 1, 1e-3)
    learned(kept(), 1, 1e-3)
    assert not caplog.messages
    found = learned({**kept(), **change}, 1, 1e-3)
    assert len(caplog.messages) == 1 and not found.graded
    assert not found.calibration.cells and not found.reach[0].asked and not found.drafting.lines
    assert learned([1, 2], 1, 1e-3).prefill_cost == [0.0]


class Kept:
    """Memory of `count` asks of one drafter, which have saved so many seconds."""

    def __init__(self, count: int, saved: float = 0.0) -> None:
        self.count, self.saved = count, saved

    def read(self) -> Any:
        found = kept()
        found["reach"][0]["asked"], found["saved"] = self.count, self.saved
        return found

    def write(self, value: Any) -> None: ...


@pytest.mark.parametrize("asked, steps", [(3, USUAL_GRACE.total), (300, KNOWN_GRACE)])
def test_less_may_be_lost_where_all_drafters_are_known(asked: int, steps: float) -> None:
    limits = FixedController(Options(), 4, lambda depth: depth, 100)
    arms = [Arm(("drafter",), 4, lambda depth: depth)]
    auto = AutoController(limits, Evidence(arms, ForwardCost({1: 0.002}), Kept(asked)))
    auto.budget(Batch([RowStep(make_row([1, 2, 3]), 2, 1)]))
    assert auto.evidence.ledger.grace == pytest.approx(0.002 * steps, rel=0.01)


@pytest.mark.parametrize("saved, steps", [(0.002, 1.0), (10.0, MOST_KEPT)])
def test_what_was_saved_before_may_be_lost(saved: float, steps: float) -> None:
    limits = FixedController(Options(), 4, lambda depth: depth, 100)
    arms = [Arm(("drafter",), 4, lambda depth: depth)]
    auto = AutoController(limits, Evidence(arms, ForwardCost({1: 0.002}), Kept(300, saved)))
    auto.budget(Batch([RowStep(make_row([1, 2, 3]), 2, 1)]))
    room = 0.002 * ((USED - RESERVE) * KNOWN_GRACE + steps)
    assert auto.evidence.ledger.room == pytest.approx(room, rel=0.01)
    assert auto.evidence.learned.written()["saved"] == pytest.approx(0.002 * steps)


def test_a_chunk_of_a_prompt_takes_nothing_of_what_was_saved() -> None:
    limits = FixedController(Options(), 4, lambda depth: depth, 100)
    arms = [Arm(("drafter",), 4, lambda depth: depth)]
    auto = AutoController(limits, Evidence(arms, ForwardCost({1: 0.1}), Kept(300, 10.0)))
    row = make_row([1] * 100)
    batch = Batch([RowStep(row, 0, 50, emits=False)], prefill=True)
    auto.budget(batch)
    auto.learn(Commit(batch), Times(0.0, 1.0, 0.0))
    assert auto.evidence.ledger.loss == pytest.approx(-0.1 * MOST_KEPT, rel=0.01)


def test_a_new_engine_begins_with_the_evidence_of_the_last_one(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tmp_path.chmod(0o700)
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path))
    monkeypatch.setattr("outrider.engine.adaptive.StoredJson", StoredJson)
    config: dict[str, Any] = {"method": "ngram", "adaptive": True}
    params = SamplingParams(temperature=0, max_tokens=48, ignore_eos=True)
    llm = LLM(str(tiny), speculative_config=config)
    llm.generate({"prompt_token_ids": [5, 6, 7] * 4}, params)
    asked = [reach.asked for reach in _controller(llm).evidence.reach]
    assert sum(asked) > 0
    again = _controller(LLM(str(tiny), speculative_config=config)).evidence
    assert [reach.asked for reach in again.reach] == asked
    other = _controller(LLM(str(tiny), speculative_config={**config, "prompt_lookup_max": 2})).evidence
    assert not other.reach[0].asked


def test_a_grown_target_does_not_begin_with_the_evidence_of_the_small_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both are in the same folder, and their drafts cost differently beside a step."""
    tmp_path.chmod(0o700)
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path))
    monkeypatch.setattr("outrider.engine.adaptive.StoredJson", StoredJson)
    config: dict[str, Any] = {"method": "ngram", "adaptive": True}
    llm = LLM("builtin", speculative_config=config, max_model_len=128)
    params = SamplingParams(temperature=0, max_tokens=48, ignore_eos=True)
    llm.generate({"prompt_token_ids": [5, 6, 7] * 4}, params)
    assert _controller(llm).evidence.reach[0].asked
    grown = _controller(LLM(GROWN, speculative_config=config, max_model_len=128)).evidence
    assert not grown.reach[0].asked


def _controller(llm: LLM) -> AutoController:
    controller = llm.engine.controller
    assert isinstance(controller, AutoController)
    return controller
