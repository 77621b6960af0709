"""Prefill by a draft model for which no draft can pay."""

from __future__ import annotations

import pytest
from test_planner import PLAIN, PROMPT, controller, left_out

from outrider.control.cost import ForwardCost
from outrider.control.ledger import CROWD
from outrider.core.step import Batch, RowStep
from outrider.testing import make_row


@pytest.mark.parametrize("waiting", [0, 63])
def test_prompts_are_read_if_drafts_pay_beside_the_requests_that_wait(waiting: int) -> None:
    auto = controller(acceptance=0.9, level=0.05, prefill=0.01)
    auto.evidence.forward = ForwardCost({1: PLAIN, 8: 1.2 * PLAIN, 64: 20 * PLAIN})
    row = make_row([1] * PROMPT, limit=PROMPT + 50)
    batch = Batch([RowStep(row, 0, PROMPT)], prefill=True)
    batch.waiting = waiting
    auto.planner.random.random = lambda: 0.99  # type: ignore[method-assign]
    auto.budget(batch)
    assert bool(row.left_out) == bool(waiting)


def test_prefill_that_no_draft_has_earned_is_lost_when_the_request_ends() -> None:
    """What was expected of it was no loss until then."""
    auto, row = controller(acceptance=0.9, level=0.05, prefill=0.01), make_row([1] * PROMPT, limit=2 * PROMPT)
    auto.budget(Batch([RowStep(row, 0, PROMPT)], prefill=True))
    assert not row.left_out and auto.evidence.ledger.loss == 0
    auto.evidence.close(row, auto.load)
    assert auto.evidence.ledger.loss == pytest.approx(0.01 * PLAIN * PROMPT)


def test_no_prompt_is_read_while_losses_leave_no_room_for_a_draft() -> None:
    """A draft token needs 0.06 ms or more, and 50 plain steps earn 0.5."""
    auto = controller(acceptance=0.9, level=0.05, prefill=0.01)
    auto.evidence.ledger.loss = 0.1
    assert left_out(auto) == 40
    assert left_out(auto, tokens=20_000) == 0


def test_a_prompt_that_a_draft_model_left_out_of_a_crowd_is_not_charged_for_later() -> None:
    """Its next chunk is computed when fewer requests wait."""
    auto, row = controller(acceptance=0.9, level=0.05, prefill=0.001), make_row([1] * 1000, limit=1001)
    auto.planner.random.random = lambda: 0.0  # type: ignore[method-assign]
    batch, before = Batch([RowStep(row, 0, 100)]), auto.evidence.ledger.loss
    for batch.waiting in (CROWD + 1, 0):
        auto.prefill_choice.leave_out(batch)
    assert row.left_out and not auto.prefill_choice.computes(batch)
    assert auto.evidence.ledger.loss == before
