"""The search keeps the fastest settings, keeps to its time, and never recommends a slower one."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest

from outrider import LLM, SamplingParams, draft
from outrider.bench.prompts import TASKS, rendered
from outrider.config import SpeculativeOptions
from outrider.errors import ConfigError
from outrider.tune import search
from outrider.tune.search import OFF, Candidate, Outcome, Pair, Search, Space, spaces

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

    def _visit(self, candidate: Candidate) -> bool:
        noise = 1 + 0.1 * (len(candidate.pairs) % 3 - 1)
        seconds = Pair(1.0, noise / self.speeds[candidate.label])
        self.now += sum(seconds)
        candidate.pairs.append(seconds)
        return True


def settings(count: int) -> list[Space]:
    return [Space(f"s{i}", {"method": "off"}) for i in range(count)]


def test_the_fastest_setting_wins_and_is_measured_most(target: LLM) -> None:
    speeds = {f"s{i}": 0.5 + 0.1 * i for i in range(12)}
    run = Timed(target, speeds)
    found = run.run(settings(12), lambda what: None)
    assert [one.label for one in found.ranking] == ["s11", "s10", "s9"] and not found.untried
    assert {one.label for one in found.dropped} == {f"s{i}" for i in range(9)}
    interval = found.ranking[0].interval
    assert interval is not None and interval[0] < 1.6 < interval[1]
    assert len(found.ranking[0].pairs) > 20 > len(found.dropped[-1].pairs)
    assert 600 <= run.now <= 610, "it keeps to its minutes"


def test_parameters_are_searched_and_a_method_wins_by_its_best_ones(target: LLM) -> None:
    """Method b is slower than a with the defaults of both, and faster with one value of each parameter."""
    values = {"num_speculative_tokens": (2, 3, 4, 6, 8), "nodes": (4, 8)}
    space = Space("b", {"method": "b"}, values)
    speeds = {"a": 1.1, "c": 0.7, "d": 0.6}
    for depth in (None, *values["num_speculative_tokens"]):
        for nodes in (None, *values["nodes"]):
            gain = 0.9 + 0.5 * (depth == 6) + 0.2 * (nodes == 8)
            one = space.candidate({"num_speculative_tokens": depth, "nodes": nodes})
            speeds[one.label] = gain
    asked = [Space(name, {"method": "off"}) for name in "acd"] + [space]
    found = Timed(target, speeds, 8).run(asked, lambda what: None)
    assert found.ranking[0].label == "b, depth 6, nodes 8"
    assert found.config == {"method": "b", "num_speculative_tokens": 6, "nodes": 8}
    slow = [one for one in found.dropped if one.label in "cd"]
    assert len(slow) == 2 and all(len(one.pairs) < len(found.ranking[0].pairs) for one in slow), (
        "what is slow is given up"
    )


def test_finalists_are_ranked_by_runs_that_did_not_choose_them(target: LLM) -> None:
    run = Timed(target, {f"s{i}": 1.0 + 0.1 * i for i in range(3)}, 4)
    lucky: list[Candidate] = []

    def visit(candidate: Candidate) -> bool:
        done = Timed._visit(run, candidate)
        if candidate.label == "s0" and run.now < 60 * 4 * 0.7:
            candidate.pairs[-1] = Pair(9.0, 1.0)
            lucky.append(candidate)
        return done

    run._visit = visit  # type: ignore[method-assign]
    found = run.run(settings(3), lambda what: None)
    assert lucky[-1].gain > 5 and [one.label for one in found.ranking] == ["s2", "s1", "s0"]


def test_a_prompt_that_comes_again_is_not_drafted_from_its_own_answer(target: LLM) -> None:
    """Suffix decoding keeps finished answers, of which no run may see its own."""
    prompts = [(prompt.kind, rendered(prompt, target.tokenizer)) for prompt in TASKS[:2]]
    made = Search(target, prompts, SamplingParams(temperature=0, max_tokens=24), 1.0)
    suffix, steps = Candidate("suffix", {"method": "suffix"}), list[int]()
    run = made._once

    def counted(llm: LLM, kind: str, group: list[Any]) -> Any:
        found = run(llm, kind, group)
        steps.extend(answer.speculation.steps for answer in found.answers if llm is not made.plain)
        return found

    made._once = counted  # type: ignore[method-assign]
    for _ in range(6):
        made._visit(suffix)
    first, second = steps[1:3]  # behind the one that warms up
    assert steps[1:] == [first, second] * 3


def test_settings_are_compared_over_the_same_prompts(target: LLM) -> None:
    """On the first prompt every setting gains little: those that have answered more are no better."""
    space = Space("b", {"method": "b"}, {"num_speculative_tokens": (2, 3, 4, 6, 8)})
    run = Timed(target, {"a": 1.2, "b": 1.0} | {f"b, depth {n}": 1.0 + (n == 6) for n in (2, 3, 4, 6, 8)}, 4)
    visit = run._visit

    def harder_at_first(candidate: Candidate) -> bool:
        done = visit(candidate)
        if len(candidate.pairs) == 1:
            plain, own = candidate.pairs[0]
            candidate.pairs[0] = Pair(plain, 2 * own)
        return done

    run._visit = harder_at_first  # type: ignore[method-assign]
    found = run.run([Space("a", {"method": "off"}), space], lambda what: None)
    assert found.ranking[0].label == "b, depth 6"


def test_a_slower_setting_is_not_recommended(target: LLM) -> None:
    found = Timed(target, {f"s{i}": 0.9 - 0.1 * i for i in range(4)}, 2).run(settings(4), lambda what: None)
    assert found.ranking[0].label == "s0" and found.config == OFF


def test_what_there_is_no_time_for_is_named(target: LLM) -> None:
    found = Timed(target, {f"s{i}": 1.0 for i in range(12)}, 0.2).run(settings(12), lambda what: None)
    assert found.untried and {one.label for one in found.ranking}.isdisjoint(found.untried)
    assert len(found.untried) + len(found.ranking) + len(found.dropped) == 12
    with pytest.raises(ConfigError, match="do not suffice"):
        Timed(target, {"s0": 1.0}, 0.0).run(settings(1), lambda what: None)


def test_a_model_that_supports_no_setting_is_refused_with_reasons(target: LLM) -> None:
    with pytest.raises(ConfigError, match=r"supports none of the settings\. broken: .*"):
        asked = [Space("broken", {"method": "medusa"}, {"nodes": (4, 8)})]
        Search(target, [("a", {"prompt_token_ids": [5, 6]})], PARAMS, 1).run(asked, lambda what: None)


def test_methods_without_weights_and_every_draft_are_searched() -> None:
    labels = [space.label for space in spaces(["builtin-draft", "builtin-eagle"])]
    assert len(set(labels)) == len(labels) and {"auto", "ngram", "suffix", "recycle"} <= {*labels}
    assert {"auto, builtin-draft", "builtin-draft", "suffix else builtin-draft", "builtin-eagle"} <= {*labels}
    mix = spaces(["builtin-draft"])[-1].candidate({"num_speculative_tokens": 3, "siblings": None})
    draft = {"method": "draft_model", "model": "builtin-draft", "num_speculative_tokens": 3}
    assert mix.config == {"method": "first", "drafters": [{"method": "suffix"}, draft]}


@pytest.mark.parametrize("name", [name for name, kind in draft.methods().items() if kind.tunable])
def test_every_value_that_a_method_declares_is_an_option_of_it(name: str) -> None:
    tunable = draft.method(name).tunable
    assert 1 <= len(tunable) <= 3
    for key, values in tunable.items():
        for value in values:
            parsed = SpeculativeOptions.of({"method": name, key: value})
            default = SpeculativeOptions.of({"method": name})
            assert (parsed.options, parsed.control) != (default.options, default.control), (
                "beside the default"
            )


def test_real_runs_have_the_same_tokens(target: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    ticks: Iterator[int] = itertools.count()
    prompts = [(prompt.kind, rendered(prompt, target.tokenizer)) for prompt in TASKS[3:5]]
    broken: dict[str, Any] = {
        "model": "builtin-draft",
        "vocab_mismatch": "retokenize",
        "draft_device": "cuda",
    }
    asked = [Space("draft", {"model": "builtin-draft"}, {"siblings": (2,)}), Space("broken", broken)]
    run = Search(target, prompts, PARAMS, 1, lambda: 6.0 * next(ticks))
    found = run.run(asked, lambda what: None)
    assert isinstance(found, Outcome) and found.ranking[0].label in ("draft", "draft, siblings 2")
    assert "broken" in found.refused and not found.ranking[0].changed and found.ranking[0].gain > 0
    monkeypatch.setattr(search, "once", changed(search.once))
    again = Search(target, prompts, PARAMS, 1, lambda: 6.0 * next(ticks)).run(asked[:1], lambda what: None)
    assert again.ranking[0].changed


def changed(once: Any) -> Any:
    """`once` with another last token of every drafting engine."""

    def wrong(llm: LLM, *arguments: Any) -> Any:
        run = once(llm, *arguments)
        if llm.engine.drafter.depth:
            run.answers[0].token_ids[-1] += 1
        return run

    return wrong


@pytest.mark.parametrize("runs", [1, 3, 60])
def test_ctrl_c_ends_with_what_was_measured(target: LLM, runs: int) -> None:
    """In the search, and in the final."""
    search = Timed(target, {f"s{i}": 1.0 + 0.1 * i for i in range(6)}, 4)
    visit, left = search._visit, iter(range(runs))

    def interrupted(candidate: Candidate) -> bool:
        if next(left, None) is None:
            raise KeyboardInterrupt
        return visit(candidate)

    search._visit = interrupted  # type: ignore[method-assign]
    found = search.run(settings(6), lambda what: None)
    assert found.interrupted and all(one.pairs for one in (*found.ranking, *found.dropped))
    assert len(found.ranking) + len(found.dropped) + len(found.untried) == 6
    assert found.ranking[0].label == {1: "s0", 3: "s2", 60: "s5"}[runs]
    assert found.config == {"method": "off"}


def test_ctrl_c_before_any_run_is_one(target: LLM) -> None:
    search = Timed(target, {}, 4)
    search._visit = lambda candidate: (_ for _ in ()).throw(KeyboardInterrupt)  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        search.run(settings(2), lambda what: None)
