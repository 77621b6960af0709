"""A control module is fitted to judged draft tokens, and kept only if it predicts better than the bins."""

from __future__ import annotations

import random

import pytest

from outrider import LLM, SamplingParams
from outrider.bench.prompts import TASKS, rendered
from outrider.control.acceptance import key_of
from outrider.control.module import PLACES, Judged, Request
from outrider.errors import ConfigError
from outrider.tune import control
from outrider.tune.control import Answered, configs, fit, record

NAMES = ["draft_model"]


def answers(count: int, informative: bool, seed: int = 0) -> list[Answered]:
    """Bins give 0.75 to all nodes; confidences of one bin tell them apart, or do not."""
    rng, made = random.Random(seed), list[Answered]()
    for i in range(count):
        nodes = []
        for _ in range(60):
            confidence = rng.choice((0.9, 0.99))
            chance = (0.95 if confidence > 0.95 else 0.55) if informative else 0.75
            place = key_of(1, 1, confidence) % PLACES
            nodes.append(Judged(Request(0, 0, 2, 0, 1), place, 0.75, rng.random() < chance))
        made.append(Answered(NAMES, nodes, i, i % 4 == 3))
    return made


def test_what_the_bins_do_not_tell_apart_is_learned() -> None:
    found = fit(answers(40, informative=True), {"target": "t"})
    assert found.better and found.bins - found.loss > 0.05
    assert found.network.methods == NAMES and found.network.about["target"] == "t"
    assert (found.nodes, found.held_out) == (30 * 60, 10 * 60)


def test_noise_does_not_beat_the_bins() -> None:
    found = fit(answers(40, informative=False), {})
    assert not found.better and found.loss > found.bins - 0.01


def test_too_little_is_refused() -> None:
    with pytest.raises(ConfigError, match="give more --prompts"):
        fit(answers(8, informative=True), {})


def test_two_like_answers_to_a_prompt_are_no_further_evidence() -> None:
    once, twice = (fit([a for a in answers(40, informative=True) for _ in range(n)], {}) for n in (1, 2))
    assert twice.held_out == 2 * once.held_out
    assert twice.spread == pytest.approx(once.spread, rel=0.02)


def test_an_answer_is_not_drafted_from_another_one_to_the_same_prompt(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(control, "COLD", 0)
    target = LLM("builtin", max_num_seqs=1, max_model_len=256)
    prompts = [(prompt.kind, rendered(prompt, target.tokenizer)) for prompt in TASKS[:1]]
    greedy = SamplingParams(temperature=0, max_tokens=30)
    first, again = record(target, configs([])[0], prompts, [greedy] * 2, lambda kind: None)
    assert len(first.nodes) > 3 and first.prompt == again.prompt == 0
    assert [(n.place, n.accepted) for n in first.nodes] == [(n.place, n.accepted) for n in again.nodes]


def test_every_judged_node_is_recorded_with_its_calibrated_probability() -> None:
    target = LLM("builtin", max_num_seqs=1, max_model_len=256)
    prompts = [(prompt.kind, rendered(prompt, target.tokenizer)) for prompt in TASKS[:7]]
    params = [SamplingParams(temperature=t, max_tokens=40, seed=3) for t in (0.0, 0.8)]
    mix = configs(["builtin-draft"])[-1]
    assert mix["method"] == "auto"
    done: list[str] = []
    found = record(target, mix, prompts, params, done.append)
    assert len(done) == 14 and [answer.held_out for answer in found[-3:]] == [False, True, True]
    nodes = [node for answer in found for node in answer.nodes]
    assert len(nodes) > 100 and all(0 < node.probability < 1 for node in nodes)
    assert {node.request.method for node in nodes} > {1}, "the draft model alone, and others"
    assert {node.request.temperature for node in nodes} == {0, 8}
    assert len({node.place % 31 for node in nodes}) > 8, "confidences are measured, not constant"
    right = sum(node.accepted for node in nodes)
    assert 0.2 * len(nodes) < right < len(nodes)
