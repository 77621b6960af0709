"""Prefill pacing in a running engine: the tokens stay the same, and a long prompt gets on."""

from __future__ import annotations

import itertools
import time

import pytest
from helpers import answer

from outrider import LLM, SamplingParams
from outrider.engine import engine, flights
from outrider.testing import EngineDriver, visible_parts

LONG = {"prompt_token_ids": [i % 40 + 3 for i in range(100)]}


@pytest.mark.parametrize("slowdown", [None, 1.01, 100.0])
def test_a_long_prompt_beside_decoding_rows(
    slowdown: float | None, llama: str, plain: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a clock on which all steps take equally long, so that the machine's load changes nothing."""
    clock = itertools.count(time.perf_counter(), 1e-3)
    for module in (engine, flights):
        monkeypatch.setattr(module, "working_time", lambda: next(clock))
    llm = LLM(
        llama, max_num_seqs=4, max_model_len=128, max_num_batched_tokens=32, max_decode_slowdown=slowdown
    )
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    alone = llm.generate(LONG, params)[0]
    llm.engine.forget_prefixes()
    others = [{"prompt_token_ids": [i + 3]} for i in range(3)]
    stream = llm.stream(others, SamplingParams(temperature=0, max_tokens=120, ignore_eos=True))
    for _ in range(30):
        next(stream)
    driver = EngineDriver(llm)
    request = driver.add_request(LONG, params)
    before, waited = llm.engine.steps, 0
    for _ in stream:
        if not waited and request.rows[0].arrivals:
            waited = llm.engine.steps - before
    while not request.finished:
        driver.step()
    output = driver.finish(request)
    assert (
        visible_parts(output.outputs)
        == visible_parts(alone.outputs)
        == visible_parts(answer(plain, LONG["prompt_token_ids"], params).outputs)
    )
    assert slowdown == 1.01 or 0 < waited < 10, "the prompt waits for four chunks"
    llm.engine.check()
