"""Which controller gets a batch where several steps are in flight."""

from __future__ import annotations

import itertools
import time
from pathlib import Path

import pytest

from outrider import LLM, SamplingParams
from outrider.control.auto import AutoController
from outrider.control.cost import ForwardCost
from outrider.control.evidence import Evidence
from outrider.control.fixed import FixedController, Options
from outrider.control.plan import Arm
from outrider.control.planner import Settings
from outrider.core.clock import Times
from outrider.core.device import DeviceEvent
from outrider.core.row import Row
from outrider.core.step import Batch, Commit, RowStep
from outrider.core.tree import DraftTree
from outrider.engine import flights
from outrider.engine.flights import Flight, controller_of
from outrider.testing import make_row, tiny_checkpoint

DEPTH, ASKED = 4, 5


def controllers() -> list[AutoController]:
    """Two with the same evidence, by which drafts are cheap and pay.  Planning is dear, so plans hold."""
    limits = FixedController(Options(), DEPTH, lambda depth: depth, 100)
    arms = [Arm(("drafter",), DEPTH, lambda depth: depth)]
    evidence = Evidence(arms, ForwardCost())
    evidence.reach[0].asked = ASKED  # its first drafts, which are short, are over
    ticks = itertools.count(0.0, 0.0005)
    return [AutoController(limits, evidence, Settings(clock=ticks.__next__)) for _ in range(2)]


def batch_of(*rows: Row) -> Batch:
    return Batch([RowStep(row, len(row.tokens) - 1, 1) for row in rows])


def draft(controller: AutoController, row: Row) -> None:
    """Steps of a row whose drafts are accepted, up to one that is not taken in yet."""
    for _ in range(40):
        batch = batch_of(row)
        (step,) = batch
        step.budget = controller.budget(batch)[0]
        step.tree = DraftTree.chain([7] * step.budget.depth, [0.99] * step.budget.depth)
        controller.trim(batch)
        step.accepted, step.emitted = [*range(step.tree.size)], [7] * (step.tree.size + 1)
        row.steps += 1
        controller.learn(Commit(batch), Times(0.0, 0.001, 0.0))
        if controller.log and controller.tries:
            return
    raise AssertionError("every step was taken in at once")


def test_rows_stay_with_their_controller() -> None:
    first, second = controllers()
    a, b = make_row([1, 2, 3], limit=1000), make_row([1, 2, 3], id="1", limit=1000)
    draft(first, a)
    draft(second, b)
    assert controller_of(batch_of(a), [first, second], []) is first
    assert controller_of(batch_of(b), [first, second], []) is second
    assert first.log and second.log


def test_a_controller_has_one_step_in_flight() -> None:
    first, second = controllers()
    row = make_row([1, 2, 3], limit=1000)
    draft(first, row)
    flight = Flight(Batch(), first, lambda: NotImplemented)
    assert controller_of(batch_of(row), [first, second], [flight]) is second


def test_what_a_controller_has_of_a_row_is_taken_in_before_another_one_gets_it() -> None:
    first, second = controllers()
    a, b = make_row([1, 2, 3], limit=1000), make_row([1, 2, 3], id="1", limit=1000)
    draft(first, a)
    draft(second, b)
    assert controller_of(batch_of(a, b), [first, second], []) is first
    assert first.log and not second.log
    assert sum(second.evidence.states[b].summary.steps.values()) > 0


def test_waiting_for_what_drafters_asked_of_a_device_is_drafting(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is computed before the forward, which the controller would otherwise take for slower."""
    moments = iter([10.0, 14.0, 20.0])
    monkeypatch.setattr(flights, "working_time", moments.__next__)
    flight = Flight(Batch(), controllers()[0], lambda: NotImplemented, 1.0, 2.0, 3.0, DeviceEvent())
    flight.result()
    assert (flight.propose, flight.forward, flight.rest) == (5.0, 8.0, 3.0)


def test_what_a_drafter_does_after_a_step_is_drafting_on_a_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And no part of what plain decoding is taken to cost."""
    llm = LLM(tiny_checkpoint(tmp_path / "llama"), speculative_config={"method": "auto"})
    engine, found = llm.engine, list[Times]()
    monkeypatch.setattr(engine, "ahead", True)
    learn = engine.adaptive[0].learn

    def listening(commit: Commit, times: Times) -> None:
        if not commit.batch.prefill:
            found.append(times)
        learn(commit, times)

    monkeypatch.setattr(engine.adaptive[0], "learn", listening)
    monkeypatch.setattr(engine.drafter, "observe", lambda commit: time.sleep(0.2))
    params = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True, detokenize=False)
    llm.generate({"prompt_token_ids": [1, 2, 3]}, params, use_tqdm=False)
    assert found and all(times.propose >= 0.2 > times.rest for times in found)
