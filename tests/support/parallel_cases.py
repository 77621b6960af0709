"""Requests for engines on several ranks: chunked prompts, a shared prefix, too few pages for all."""

from __future__ import annotations

import pytest
from helpers import answer, token_prompts, unpaced

from outrider import LLM, RequestOutput, SamplingParams
from outrider.core.block_table import PAGE
from outrider.engine import memory
from outrider.parallel import model as parallel
from outrider.parallel.layout import Layout
from outrider.testing import check_idle, check_statistics, random_prompts, visible_parts

LAYOUTS = {
    "one": Layout(),
    "tp2": Layout(2),
    "tp4": Layout(4),
    "pp2": Layout(1, 2),
    "pp3": Layout(1, 3),
    "tp2pp2": Layout(2, 2),
    "apart": Layout(1, 2, (0, 4)),  # rank 0 has no layers: it drafts
}
COMMON = [5 + i * i % 290 for i in range(34)]
PROMPTS = [[*COMMON, *tail] for tail in random_prompts(4, seed=4, longest=14)]
PAGES = 7  # of K/V; four requests need 10


def params_of(temperature: float) -> list[SamplingParams]:
    return [
        SamplingParams(temperature=temperature, seed=i, max_tokens=16, ignore_eos=True)
        for i in range(len(PROMPTS))
    ]


@pytest.fixture
def crowded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps run in pieces of three rows, and engines have PAGES pages from their next method on."""
    monkeypatch.setattr(parallel, "PIECE_ROWS", 3)
    monkeypatch.setattr(memory, "plan_pages", lambda *given: PAGES)


def check_tokens(llm: LLM, expected: list[tuple[object, ...]], temperature: float) -> list[RequestOutput]:
    """Compare the tokens of all requests in one batch, then of the first one from cached pages."""
    unpaced(llm)
    outputs = llm.generate(token_prompts(PROMPTS), params_of(temperature))
    assert [visible_parts(output.outputs) for output in outputs] == expected
    check_statistics([sample for output in outputs for sample in output.outputs])
    assert llm.engine.scheduler.preemptions > 0
    cached = [answer(llm, PROMPTS[0], params_of(temperature)[0]) for _ in range(2)][1]
    assert visible_parts(cached.outputs) == expected[0] and cached.num_cached_tokens >= PAGE
    check_idle(llm)
    return outputs
