"""Repeats of a measurement start from the same knowledge."""

from __future__ import annotations

import pytest

from outrider import LLM, SamplingParams
from outrider.bench import rounds as bench
from outrider.core.clock import Times


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


def test_a_round_that_ends_after_an_engine_was_stopped_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has as many runs as a whole one without that engine."""
    own, others = list[str](), list[str]()

    def once(llm: LLM, kind: str, *_: object) -> bench.Run:
        own.append(kind)
        if len(own) == 10:  # 2 that warm up, 4 of the first round; the last one of the second round
            raise KeyboardInterrupt
        return bench.Run(kind, 1.0, Times(), [])

    def other(kind: str, group: object) -> bench.Run:
        others.append(kind)
        if len(others) == 5:  # 1 that warms up, 2 of the first round; the second one of the second round
            raise bench.Stopped("too slow")
        return bench.Run(kind, 1.0, Times(), [])

    monkeypatch.setattr(bench, "once", once)
    llm = LLM("builtin", speculative_config=None)
    configs = {"plain": None, "ngram": {"method": "ngram", "num_speculative_tokens": 2}}
    prompts, rounds = [("one", "a"), ("two", "b")], bench.Rounds(2, runs=1, fresh=False)
    with pytest.raises(bench.Interrupted) as stopped:
        bench.measure(llm, configs, prompts, SamplingParams(), rounds, others={"peer": other})
    found = {result.method: [run.kind for run in result.runs] for result in stopped.value.results}
    assert found == {"plain": ["one", "two"], "ngram": ["one", "two"], "peer": []}
    assert all(run.turns == [1.0] for result in stopped.value.results for run in result.runs)
