"""The search keeps the fastest settings, keeps to its time, and never recommends a slower one."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest

from outrider import LLM, SamplingParams
from outrider.bench.prompts import TASKS, rendered
from outrider.config import SpeculativeOptions
from outrider.errors import ConfigError
from outrider.tune import search
from outrider.tune.search import OFF, Candidate, Outcome, Search, candidates

PARAMS = SamplingParams(temperature=0, max_tokens=8)


@pytest.fixture(scope="module")
def target() -> LLM:
    return LLM("builtin", max_num_seqs=1, max_model_len=256)


class Timed(Search):
    """A search whose runs take the seconds that `speeds` names: gain by label, on a clock of its own."""

    def __init__(self, target: LLM, speeds: dict[str, float], minutes: float = 10.0) -> None:
        self.now, self.speeds = 0.0, speeds
        prompts = [(prompt.kind, rendered(prompt, target.tokenizer)) for prompt in TASKS[:2]]
        super().__init__(target, prompts, PARAMS, minutes, lambda: self.now)

    def _pair(self, candidate: Candidate, variant: LLM) -> None:
        noise = 1 + 0.1 * (len(candidate.pairs) % 3 - 1)
        seconds = 1.0, noise / self.speeds[candidate.label]
        self.now += sum(seconds)
        candidate.pairs.append(seconds)


def settings(count: int) -> list[Candidate]:
    return [Candidate(f"s{i}", {"method": "off"}) for i in range(count)]


def test_the_fastest_setting_wins_and_is_measured_most(target: LLM) -> None:
    speeds = {f"s{i}": 0.5 + 0.1 * i for i in range(12)}
    run = Timed(target, speeds)
    found = run.run(settings(12), lambda what: None)
    assert [one.label for one in found.ranking] == ["s11", "s10", "s9"] and not found.untried
    assert {one.label for one in found.dropped} == {f"s{i}" for i in range(9)}
    low, high = found.ranking[0].interval
    assert low < 1.6 < high and len(found.ranking[0].pairs) > 20 > len(found.dropped[-1].pairs)
    assert 600 <= run.now <= 610, "it keeps to its minutes"


def test_a_prompt_that_comes_again_is_not_drafted_from_its_own_answer(target: LLM) -> None:
    """Suffix decoding keeps finished answers, of which no run may see its own."""
    prompts = [(prompt.kind, rendered(prompt, target.tokenizer)) for prompt in TASKS[:2]]
    made = Search(target, prompts, SamplingParams(temperature=0, max_tokens=24), 1.0)
    made.plain, made.fresh = target.variant(None), {}
    suffix, steps = Candidate("suffix", {"method": "suffix"}), list[int]()
    variant = target.variant(suffix.config)
    run = made._once

    def counted(llm: LLM, kind: str, group: list[Any]) -> Any:
        found = run(llm, kind, group)
        steps.extend(answer.speculation.steps for answer in found.answers if llm is variant)
        return found

    made._once = counted  # type: ignore[method-assign]
    for _ in range(6):
        made._pair(suffix, variant)
    first, second = steps[1:3]  # behind the one that warms up
    assert steps[1:] == [first, second] * 3


def test_a_slower_setting_is_not_recommended(target: LLM) -> None:
    found = Timed(target, {f"s{i}": 0.9 - 0.1 * i for i in range(4)}, 2).run(settings(4), lambda what: None)
    assert found.ranking[0].label == "s0" and found.config == OFF


def test_what_there_is_no_time_for_is_named(target: LLM) -> None:
    found = Timed(target, {f"s{i}": 1.0 for i in range(12)}, 0.2).run(settings(12), lambda what: None)
    assert found.untried and {one.label for one in found.ranking}.isdisjoint(found.untried)
    with pytest.raises(ConfigError, match="do not suffice"):
        Timed(target, {"s0": 1.0}, 0.0).run(settings(1), lambda what: None)


def test_every_candidate_is_a_speculative_config() -> None:
    made = candidates(["builtin-draft", "builtin-eagle"])
    assert len({one.label for one in made}) == len(made) > 20
    for one in made:
        SpeculativeOptions.of(one.config)


def test_real_runs_have_the_same_tokens(target: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    ticks: Iterator[int] = itertools.count()
    prompts = [(prompt.kind, rendered(prompt, target.tokenizer)) for prompt in TASKS[3:5]]
    broken: dict[str, Any] = {
        "model": "builtin-draft",
        "vocab_mismatch": "retokenize",
        "draft_device": "cuda",
    }
    asked = [Candidate("draft", {"model": "builtin-draft"}), Candidate("broken", broken)]
    run = Search(target, prompts, PARAMS, 1, lambda: 2.0 * next(ticks))
    found = run.run(asked, lambda what: None)
    assert isinstance(found, Outcome) and [one.label for one in found.ranking] == ["draft"]
    assert "broken" in found.refused and not found.ranking[0].changed and found.ranking[0].gain > 0
    monkeypatch.setattr(search, "once", changed(search.once))
    again = Search(target, prompts, PARAMS, 1, lambda: 2.0 * next(ticks)).run(asked[:1], lambda what: None)
    assert again.ranking[0].changed


def changed(once: Any) -> Any:
    """`once` with another last token of every drafting engine."""

    def wrong(llm: LLM, *arguments: Any) -> Any:
        run = once(llm, *arguments)
        if llm.engine.drafter.depth:
            run.answers[0].token_ids[-1] += 1
        return run

    return wrong
