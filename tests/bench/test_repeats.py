"""Repeats of a measurement start from the same knowledge."""

from __future__ import annotations

import pytest

from outrider import LLM, SamplingParams
from outrider.bench import rounds as bench


@pytest.mark.parametrize("fresh", [True, False])
def test_no_repeat_drafts_from_the_answers_of_an_earlier_one(
    fresh: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps: list[int] = []
    once = bench.once

    def counted(llm: LLM, *given: object) -> bench.Run:
        found = once(llm, *given)  # type: ignore[arg-type]
        if llm.engine.drafter.memory is not None:
            steps.append(found.answers[0].speculation.steps)
        return found

    monkeypatch.setattr(bench, "once", counted)
    llm = LLM("builtin", speculative_config=None)
    configs = {"plain": None, "suffix": {"method": "suffix", "num_speculative_tokens": 8}}
    prompts = [("story", "Tell me a story"), ("story", "Tell me another story")]
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    bench.measure(llm, configs, prompts, params, bench.Rounds(3, runs=1, fresh=fresh))
    size = 3 if fresh else 2  # runs of a repeat, with one that warms up
    repeats = [steps[i : i + size] for i in range(0 if fresh else 1, len(steps), size)]
    assert len(repeats) == 3 and repeats[0] == repeats[1] == repeats[2]
