"""Whether a drafter that computes prompts with a model of its own takes part in a request."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from outrider import LLM, SamplingParams
from outrider.control.auto import AutoController
from outrider.control.cost import ForwardCost
from outrider.control.fixed import FixedController, Options
from outrider.control.plan import Arm
from outrider.core.clock import Times
from outrider.core.step import Batch, Commit, RowStep
from outrider.testing import make_row

DEPTH, PROMPT = 4, 200
PLAIN = 0.001  # seconds


def controller(acceptance: float, level: float, prefill: float) -> AutoController:
    """A draft model.  level, prefill: plain steps for a drafted level, and for a token of a prompt."""
    limits = FixedController(Options(), DEPTH, lambda depth: depth, 100)
    arm = Arm(("draft_model",), DEPTH, lambda depth: depth, prefills=True)
    auto = AutoController(limits, [arm], ForwardCost({1: PLAIN, 8: 1.2 * PLAIN}), clock=lambda: 0.0)
    reach = auto.evidence.reach[0]
    for i in range(100):
        reach.learn(DEPTH if i % 100 < 100 * acceptance else 0, i % 100 >= 100 * acceptance, 1.0)
        auto.evidence.drafting.learn(0, 1, 1 + i % DEPTH, (1 + i % DEPTH) * level * PLAIN)
    auto.evidence.prefill_cost[0] = prefill * PLAIN
    return auto


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


def test_a_drafter_of_which_nothing_is_known_reads() -> None:
    limits = FixedController(Options(), DEPTH, lambda depth: depth, 100)
    arms = [Arm(("draft_model",), DEPTH, lambda depth: depth, prefills=True)]
    assert left_out(AutoController(limits, arms, ForwardCost({1: PLAIN}), clock=lambda: 0.0)) == 0


def test_prefill_is_no_loss_of_the_row_and_its_cost_is_learned() -> None:
    auto, row = controller(acceptance=0.9, level=0.05, prefill=0.0), make_row([1] * PROMPT, limit=2 * PROMPT)
    batch = Batch([RowStep(row, 0, PROMPT)], prefill=True)
    auto.budget(batch)
    batch[0].emitted = [1]
    auto.learn(Commit(batch), Times(0.02, 0.03, 0.0))
    assert auto.evidence.prefill_cost[0] == pytest.approx(0.02 / PROMPT)
    assert auto.evidence.prefill_seconds == pytest.approx(0.02) and auto.evidence.ledger.loss < 0.001


def test_a_prompt_in_chunks_is_decided_on_once() -> None:
    auto = controller(acceptance=0.1, level=0.8, prefill=0.05)
    row = make_row([1] * PROMPT, limit=PROMPT + 50)
    auto.planner.random.random = lambda: 0.0  # type: ignore[method-assign]
    auto.budget(Batch([RowStep(row, 0, 64)], prefill=True))
    auto.planner.random.random = lambda: 0.99  # type: ignore[method-assign]
    auto.budget(Batch([RowStep(row, 64, 64)], prefill=True))
    assert not row.left_out


@pytest.mark.parametrize("config", [{"method": "auto"}, {"method": "draft_model", "adaptive": True}])
def test_no_draft_tokens_are_allowed(tiny: Path, config: dict[str, Any]) -> None:
    given = {**config, "model": str(tiny), "num_speculative_tokens": 0}
    llm = LLM(str(tiny), speculative_config=given)
    (output,) = llm.generate({"prompt_token_ids": [5, 6, 7]}, SamplingParams(temperature=0, max_tokens=4))
    assert not output.speculation.drafted


def test_the_text_of_a_request_without_the_draft_model_is_the_same(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some requests leave it out, others share their pages and draft behind them."""
    from outrider.control.planner import Planner

    def every_second(self: Planner, batch: Batch) -> None:
        for row in batch.rows:
            if not row.steps and int(row.id) % 2:
                row.left_out = frozenset({"draft_model"})

    monkeypatch.setattr(Planner, "leave_out", every_second)
    llm = LLM(str(tiny), max_num_seqs=3, speculative_config=None)
    draft: dict[str, Any] = {"method": "draft_model", "model": str(tiny), "adaptive": True}
    prompts: list[Any] = [{"prompt_token_ids": [5 + i % 3] * 40 + [9, 8, i]} for i in range(8)]
    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    plain = [output.outputs[0].token_ids for output in llm.generate(prompts, params)]
    adaptive = llm.variant(draft)
    found = adaptive.generate(prompts, params)
    assert [output.outputs[0].token_ids for output in found] == plain
    drafted = [output.outputs[0].speculation.drafted for output in found]
    assert any(drafted) and not any(drafted[1::2])
    adaptive.engine.check()
