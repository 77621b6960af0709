"""The estimate counts the very steps of a chain, and a tree's closely, before any speculative run."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from outrider import LLM, SamplingParams
from outrider.bench.prompts import TASKS, rendered
from outrider.checkpoints.hub import locate
from outrider.core.clock import Times
from outrider.draft.draft_model.drafter import ModelDrafter
from outrider.errors import ConfigError
from outrider.tune import estimate as module
from outrider.tune.estimate import (
    AGAIN,
    REPEATS,
    Answer,
    Costs,
    Rounds,
    Shape,
    _drafter,
    _variant,
    accepted,
    estimate,
    judged,
    predictions,
    settled,
    steps_of,
)

GREEDY = SamplingParams(temperature=0, max_tokens=40)
SAMPLED = SamplingParams(temperature=0.8, seed=3, max_tokens=40)


@pytest.fixture(scope="module")
def target() -> LLM:
    return LLM("builtin", max_num_seqs=1, max_model_len=256)


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("siblings", [1, 2])
def test_predicted_steps_are_those_of_a_run(target: LLM, params: SamplingParams, siblings: int) -> None:
    prompts = [rendered(prompt, target.tokenizer) for prompt in TASKS[:4]]
    drafter = _drafter(_variant(target, "builtin-draft", siblings, 3))
    predicted = measured = 0
    target.use({"model": "builtin-draft", "num_speculative_tokens": 3, "siblings": siblings})
    for output in [target.generate(prompt, params)[0] for prompt in prompts]:
        answer = judged(drafter, output.prompt_token_ids, output.outputs[0].token_ids, params)
        predicted += steps_of(answer, 3, siblings)
        measured += output.outputs[0].speculation.steps
    assert abs(predicted - measured) <= (0 if siblings == 1 else 0.05 * measured)


def test_a_chain_ends_at_the_first_miss_and_a_tree_at_a_better_rival() -> None:
    probs = [[0.6, 0.3, 0.1]] * 4
    assert accepted(Answer([0, 0, 1, 0], probs), 0, 4, 1) == 2
    assert accepted(Answer([0, 1, 0], probs), 0, 3, 2) == 3
    assert accepted(Answer([1, 1], probs), 0, 2, 2) == 1, "0.09 is behind 0.36 and 0.18"
    assert accepted(Answer([-1, 0], probs), 0, 2, 3) == 0
    assert steps_of(Answer([0, 0, -1, 0], probs), 2, 1) == 2


def test_predicted_speed_up_follows_from_costs() -> None:
    answer = Answer([0] * 9, [[0.7, 0.1, 0.1]] * 9)
    shapes = [(s, d) for s in (1, 2, 3) for d in (1, 2)]
    costs = Costs(1.0, 0.1, dict.fromkeys(shapes, 0.05), {(s, d): 0.01 * s * d for s, d in shapes})
    plain, one, two = predictions([answer], costs, 2)[:3]
    assert plain.speed == pytest.approx(9 / 1.8) and plain.gain == 1.0
    assert one.tokens_per_step == 9 / 5 and one.speed == pytest.approx(9 / (1 + 0.4 + 5 * 0.06))
    assert two.tokens_per_step == 3 and two.gain == pytest.approx(1.8 / (1 + 0.2 + 3 * 0.07))


class MadeCosts:
    """Plain steps take 1 s, drafting 0.1 s a level, and the nodes of a step `verify`.

    Every round of timings is twice as slow as the one before, up to 8 times.  The first `lucky` timings of
    chains of 3 tokens come without verification.
    """

    def __init__(self, verify: dict[int, float], lucky: int) -> None:
        self.verify, self.lucky, self.rounds, self.asked = verify, lucky, 0, list[Shape]()

    def __call__(self, llm: LLM, ids: list[int], params: SamplingParams) -> Times:
        if not isinstance(llm.engine.drafter, ModelDrafter):
            self.rounds += 1
            return Times(0.0, self.slow, 0.0)
        siblings, depth = llm.engine.drafter.options.siblings, llm.engine.controller.nodes(1)
        depth //= siblings
        self.asked.append((siblings, depth))
        added = self.verify[siblings * depth]
        if (siblings, depth) == (1, 3) and self.asked.count((1, 3)) <= self.lucky:
            added = 0.0
        return Times(self.slow * 0.1 * depth, self.slow * (1 + added), 0.0)

    @property
    def slow(self) -> float:
        return float(2 ** (self.rounds % 4))


@pytest.mark.parametrize("lucky", [0, REPEATS])
def test_costs_are_those_of_the_moment_and_no_luck_decides(
    target: LLM, monkeypatch: pytest.MonkeyPatch, lucky: int
) -> None:
    """Five nodes cost less than four, as they do with some kernels."""
    verify = {1: 0.2, 2: 0.6, 3: 0.7, 4: 1.5, 5: 1.4, 6: 1.7, 8: 2.0, 10: 3.0}
    made = MadeCosts(verify, lucky)
    monkeypatch.setattr(module, "_times", made)
    variants = {siblings: _variant(target, "builtin-draft", siblings, 5) for siblings in (1, 2)}
    answers = [Answer([0] * 5 + [-1] + [0] * 6, [[0.7, 0.2, 0.1]] * 12)]
    monkeypatch.setattr(module, "SIBLINGS", (1, 2))
    costs, found = settled(Rounds(target, variants, [[5, 6, 7]], GREEDY), answers, 1.0, 0.5)
    assert costs.step == 0.5 and costs.prompts == 1.0
    for shape in [(1, 1), (1, 2), (1, 3), (1, 4), (2, 2), (1, 5)]:
        assert costs.propose[shape] == pytest.approx(0.05 * shape[1])
        assert costs.verify[shape] == pytest.approx(0.5 * verify[shape[0] * shape[1]])
    best = max(found, key=lambda one: one.speed)
    assert (best.siblings, best.depth) == (1, 5)
    assert made.asked.count((1, 5)) == REPEATS + AGAIN and made.asked.count((1, 4)) == REPEATS
    assert made.asked.count((1, 3)) == REPEATS + (AGAIN if lucky else 0)


def test_all_costs_are_measured(target: LLM) -> None:
    prompts = [("sql", rendered(TASKS[4], target.tokenizer))]
    ticks: list[str] = []
    costs, found = estimate(target, "builtin-draft", prompts, GREEDY, 2, ticks.append)
    assert costs.step > 0 and len(costs.verify) == 9 and costs.propose[1, 0] == 0
    assert min(costs.propose[1, 1], costs.propose[1, 2], costs.verify[3, 2]) > 0
    assert [(one.siblings, one.depth) for one in found] == [(1, 0)] + [
        (s, d) for s in (1, 2, 3) for d in (1, 2)
    ]
    assert found[2].tokens_per_step > found[1].tokens_per_step > 1 and ticks[0] == "plain decoding"


def test_a_context_without_room_for_the_steps_is_refused() -> None:
    small = LLM("builtin", max_model_len=40, seed=0)
    with pytest.raises(ConfigError, match="a context of 40 tokens is too short"):
        estimate(small, "builtin-draft", [("sql", {"prompt_token_ids": [5, 6, 7]})], GREEDY, 4, print)


def test_a_draft_model_for_one_forward_is_refused(target: LLM, tmp_path: Path) -> None:
    for name in ("config.json", "model.safetensors"):
        shutil.copy(locate("builtin-draft") / name, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "pard_token": 2}))
    with pytest.raises(ConfigError, match="PARD model"):
        _variant(target, str(tmp_path), 1, 2)


def test_a_head_is_refused(target: LLM) -> None:
    with pytest.raises(ConfigError, match="only draft models"):
        _variant(target, "builtin-eagle", 1, 2)
