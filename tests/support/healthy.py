"""Whether an engine holds nothing and answers as a fresh one would."""

from __future__ import annotations

from outrider import LLM, SamplingParams

GREEDY = SamplingParams(temperature=0, max_tokens=6)
GOOD = {"prompt_token_ids": [5, 6, 7]}


def answer(llm: LLM) -> list[int]:
    return llm.generate(GOOD, GREEDY)[0].outputs[0].token_ids


def assert_well(llm: LLM) -> None:
    """The engine holds nothing and answers as a fresh one would."""
    llm.engine.check()
    assert not llm.engine.busy
    assert len(answer(llm)) == 6
    llm.engine.check()
