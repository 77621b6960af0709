"""`assert_same_text` passes for lossless speculation, and fails where one token differs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

from outrider import LLM, ConfigError, RequestError, SamplingParams
from outrider.core.step import Batch
from outrider.core.tree import ROOT, Budget, Draft, DraftTree
from outrider.drafting.base import Drafter
from outrider.testing import (
    EngineDriver,
    KnownTexts,
    Scripts,
    assert_same_text,
    check_idle,
    check_tree,
    make_drafter,
    make_row,
    propose_tree,
    random_prompts,
    replay,
    run_staggered,
    tiny_checkpoint,
)

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    return LLM(tiny_checkpoint(tmp_path_factory.mktemp("tiny")), max_num_seqs=4)


def correct_script(llm: LLM) -> Scripts:
    """Scripts that know the greedy output of the prompts of `assert_same_text`."""
    known = KnownTexts()
    for prompt in random_prompts(5):
        known.learn(prompt, 0, llm.generate(prompt, GREEDY)[0].outputs)
    return Scripts(known)


def test_ngram_leaves_the_text_unchanged(llm: LLM) -> None:
    assert_same_text(llm, {"method": "ngram", "num_speculative_tokens": 3})


def test_accepted_tokens_are_counted(llm: LLM) -> None:
    llm.use(None)
    seeded = SamplingParams(temperature=0, seed=0, max_tokens=12, ignore_eos=True)
    config = {"method": "scripted", "script": correct_script(llm).right, "num_speculative_tokens": 4}
    assert assert_same_text(llm, config, params=[seeded]) > 0
    assert not llm.has_unfinished_requests()


def test_a_changed_token_is_found(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    from outrider.verify.match import Match

    call = Match.__call__

    def change_first_token(self, batch, picker):  # type: ignore[no-untyped-def]
        call(self, batch, picker)
        for step in batch:
            if step.tree.tokens and step.emitted:
                step.emitted[0] = (step.emitted[0] + 1) % 300

    monkeypatch.setattr(Match, "__call__", change_first_token)
    with pytest.raises(AssertionError, match="prompt"):
        assert_same_text(llm, {"method": "recycle", "min_token_prob": 0.0})
    check_idle(llm)


def test_unseeded_sampling_is_refused(llm: LLM) -> None:
    with pytest.raises(AssertionError, match="seed"):
        assert_same_text(llm, {"method": "ngram"}, params=[SamplingParams(temperature=1.0)])


# ---- the driver


def test_driver_steps_requests_one_token_at_a_time(llm: LLM) -> None:
    llm.use(None)
    driver, prompt = EngineDriver(llm), random_prompts(1)[0]
    expected = llm.generate(prompt, GREEDY)[0].outputs[0].token_ids
    request = driver.add_request(prompt, GREEDY)
    for count in range(1, 13):
        driver.step()
        assert request.output().outputs[0].token_ids == expected[:count]
    assert request.finished and not driver.has_unfinished_requests()
    check_idle(llm)


def test_aborted_request_keeps_its_tokens(llm: LLM) -> None:
    llm.use(None)
    driver = EngineDriver(llm)
    request = driver.add_request(random_prompts(1)[0], GREEDY)
    for _ in range(3):
        driver.step()
    assert driver.has_unfinished_requests() and llm.has_unfinished_requests()
    output = driver.finish(request)
    assert output.outputs[0].finish_reason == "abort" and len(output.outputs[0].token_ids) == 3
    check_idle(llm)


def test_invalid_prompt_raises(llm: LLM) -> None:
    with pytest.raises(RequestError, match="empty"):
        EngineDriver(llm).add_request([], GREEDY)


def test_staggered_prompts_are_answered_and_aborted(llm: LLM) -> None:
    llm.use(None)
    prompts, steps = random_prompts(4), []
    outputs = run_staggered(llm, prompts, GREEDY, aborts={1: 5}, on_step=lambda: steps.append(1))
    assert [len(o.outputs[0].token_ids) for o in outputs] == [12, 5, 12, 12]
    assert len(steps) >= 12 + 4, "prompts 2 and 3 arrive in steps 2 and 4"


def test_check_idle_finds_an_open_request(llm: LLM) -> None:
    llm.use(None)
    driver = EngineDriver(llm)
    request = driver.add_request([5, 6, 7], GREEDY)
    with pytest.raises(AssertionError, match="still running"):
        check_idle(llm)
    driver.finish(request)
    check_idle(llm)


# ---- rows and trees


class Repeat(Drafter):
    """Proposes the last token again, as a chain."""

    @dataclass(frozen=True)
    class Options:
        pass

    def propose(self, batch: Batch) -> Draft:
        chains = [step.row.tokens[-1:] * step.budget.depth for step in batch]
        return Draft([DraftTree.chain(tokens, [0.5] * len(tokens)) for tokens in chains])


class TooDeep(Repeat):
    """Proposes one token more than the budget allows."""

    def propose(self, batch: Batch) -> Draft:
        return Draft(
            [
                DraftTree.chain([9] * (step.budget.depth + 1), [0.5] * (step.budget.depth + 1))
                for step in batch
            ]
        )


def test_replay_reports_draft_tokens_of_each_step() -> None:
    row = make_row([1, 2])
    assert replay(make_drafter(Repeat), row, [2, 2, 3, 3, 3, 3, 3], depth=3) == [3, 3]
    assert row.output == [2, 2, 3, 3, 3, 3, 3]


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        (DraftTree([1, 2], [1, ROOT], [0.5, 0.5]), "comes later"),
        (DraftTree([1, 1], [ROOT, ROOT], [0.5, 0.5]), "distinct"),
        (DraftTree([1, 2, 3, 4], [ROOT] * 4, [0.5] * 4), "budget of 3"),
        (DraftTree([1, 2, 3], [ROOT, 0, 1], [0.5] * 3), "budget of 2"),
        (DraftTree([1], [ROOT], [0.0]), "confidences"),
        (DraftTree([1, 2], [ROOT, 0], [0.5]), "differ in length"),
    ],
)
def test_malformed_tree_is_reported(tree: DraftTree, message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        check_tree(tree, Budget(2, 3))


def test_proposed_tree_is_checked() -> None:
    assert propose_tree(make_drafter(Repeat), make_row([1, 2]), depth=2).tokens == [2, 2]
    with pytest.raises(AssertionError, match="3 nodes in a budget of 2"):
        propose_tree(make_drafter(TooDeep), make_row([1, 2]), depth=2)


# ---- checkpoints


def test_tiny_checkpoint_has_text_and_eos(tmp_path: Path) -> None:
    llm = LLM(tiny_checkpoint(tmp_path, "Qwen3", seed=3, eos=[1, 7], num_hidden_layers=1))
    assert llm.engine.ending == {1, 7} and llm.engine.target.vocabulary == 300
    text = "the rain in autumn"
    assert llm.tokenizer.decode(llm.tokenizer.encode(text)) == text
    assert llm.generate(text, GREEDY)[0].outputs[0].text
    with pytest.raises(ConfigError):
        llm.use({"method": "no such method"})
