"""Every method under the adaptive controller: the text is that of plain decoding."""

from __future__ import annotations

from typing import Any

import pytest
from conditions import PROMPTS, SAMPLING, params_of
from drafter_cases import ADAPTIVE, PlainOutputs

from outrider import LLM, draft
from outrider.control.ledger import Grace
from outrider.testing import check_idle, run_staggered, use_example, visible_parts

NONE_HERE = ("grammar", "ngram", "off", "prediction")  # draft nothing for these requests
METHODS = [pytest.param(name, marks=() if name in ADAPTIVE else pytest.mark.full) for name in draft.names()]


@pytest.mark.parametrize("method", METHODS)
def test_an_adaptive_method_has_the_plain_output(
    method: str, fast: LLM, outputs_of: PlainOutputs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Greedy and sampled requests in one batch.  Everything seems to pay, and nothing is too dear."""
    monkeypatch.setattr("outrider.control.planner.pays_off", lambda option, load: True)
    monkeypatch.setattr("outrider.control.accounts.MOST_GRACE", 1e6)
    kinds = [params_of(sampling) for sampling in SAMPLING.values()]
    params = [kinds[i % len(kinds)][i] for i in range(len(PROMPTS))]
    expected = [visible_parts(outputs_of(prompt, own).outputs) for prompt, own in zip(PROMPTS, params)]
    use_example(fast, method, adaptive=True)
    controller: Any = fast.engine.controller
    if method != "off":
        controller.planner.accounts.grace = Grace(least=1e3)
    outputs = run_staggered(fast, PROMPTS, params)
    assert [visible_parts(output.outputs) for output in outputs] == expected
    assert any(output.speculation.drafted for output in outputs) == (method not in NONE_HERE)
    check_idle(fast)
