"""Errors of learning: drafting goes on, interrupts are passed on, what cannot learn is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from toys import toy_target

from outrider import LLM, SamplingParams
from outrider.draft.eagle import Network
from outrider.errors import ConfigError
from outrider.online import learner as learners
from outrider.online import texts
from outrider.online.learner import Learner
from outrider.testing.checkpoints import VOCABULARY
from outrider.train.base import write_head

Use = Callable[[], Learner]
PROMPTS = [[(7 * i + j) % VOCABULARY for j in range(5)] for i in range(12)]
GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True, detokenize=False)


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    target = toy_target(tmp_path_factory.mktemp("target"), vocab_size=VOCABULARY)
    return LLM(str(target), dtype="float32", kv_cache_memory_bytes=1 << 24)


@pytest.fixture
def use(llm: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Use:
    """Put the engine to use with learning; small rounds."""
    for name, value in {"ROUND": 2, "FIRST": 4, "HELD": 2}.items():
        monkeypatch.setattr(learners, name, value)
    torch.manual_seed(0)
    network = Network.like(llm.engine.target, bias=False)
    write_head(tmp_path / "head", network.config(), network.state_dict())

    def make() -> Learner:
        online = {"path": str(tmp_path / "learned"), "share": 0.5, "rate": 5e-3}
        head = {"model": str(tmp_path / "head"), "tree": "chain", "num_speculative_tokens": 3}
        llm.use({**head, "online": online})
        found = llm.engine.proposer.learner
        assert isinstance(found, Learner)
        return found

    return make


def tokens(llm: LLM, learner: Learner | None = None, params: SamplingParams = GREEDY) -> list[list[int]]:
    if learner is not None:
        learner.earned = 1e9
    return [list(out.outputs[0].token_ids) for out in llm.generate(PROMPTS, params)]


def raising(error: BaseException) -> Callable[..., Any]:
    def fails(*args: Any) -> Any:
        raise error

    return fails


def test_an_error_in_training_is_logged_once_and_drafting_goes_on(
    llm: LLM, use: Use, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    llm.use(None)
    plain, learner = tokens(llm), use()
    assert tokens(llm, learner) == plain
    learner.old = learner.candidate.weights()  # as in a trial
    monkeypatch.setattr(learner.candidate, "_loss", raising(MemoryError("no memory to train")))
    for _ in range(3):
        assert tokens(llm, learner) == plain
    assert learner.stopped and not learner.active and learner.old is None
    assert caplog.text.count("learning stops") == 1 and "no memory to train" in caplog.text
    assert not learner.texts.kept and not learner.texts.records
    drafts = llm.generate(PROMPTS, GREEDY)[0].speculation
    assert drafts is not None and drafts.drafted > 0
    llm.engine.check()


def test_an_interrupt_in_training_is_raised_and_learning_goes_on(
    llm: LLM, use: Use, monkeypatch: pytest.MonkeyPatch
) -> None:
    learner = use()
    plain = tokens(llm)
    assert learner.active
    learner.earned = 1e9
    learner.train()
    with monkeypatch.context() as patch:
        patch.setattr(learner.candidate, "_loss", raising(KeyboardInterrupt()))
        with pytest.raises(KeyboardInterrupt):
            learner.train()
    assert all(parameter.grad is None for parameter in learner.candidate.network.parameters())
    steps = learner.steps
    assert tokens(llm, learner) == plain
    assert learner.steps > steps and not learner.stopped


def test_weights_that_cannot_be_stored_are_used_all_the_same(
    llm: LLM, use: Use, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    learner = use()
    with monkeypatch.context() as patch:
        patch.setattr(learner.store, "save", raising(OSError(28, "No space left on device")))
        learner._swap(learner.candidate.weights())
    assert "not stored: [Errno 28] No space left" in caplog.text and not learner.stopped
    assert learner.swaps == 1 and learner.store.load() is None
    learner._swap(learner.candidate.weights())
    assert learner.store.load() is not None


def test_learning_on_another_device_is_refused(use: Use, monkeypatch: pytest.MonkeyPatch) -> None:
    learner = use()
    monkeypatch.setattr(learner.drafter.target.decoder, "device", torch.device("cuda", 1))
    with pytest.raises(ConfigError, match=r"the model is on 'cuda:1': leave online out, or .*device='cpu'"):
        Learner(learner.drafter, learner.options)


def test_a_text_holds_no_more_than_its_own_states(llm: LLM, use: Use) -> None:
    learner = use()
    long = [[(7 * i + j) % VOCABULARY for j in range(150)] for i in range(4)]
    llm.generate(long, GREEDY)
    found = [*learner.texts.kept, *learner.texts.held]
    assert found and all(len(text.tokens) < texts.CONTEXT + 24 for text in found)
    assert all(t.states.untyped_storage().nbytes() == t.states.numel() * 2 for t in found)


def test_drafts_of_guided_rows_do_not_judge_weights(llm: LLM, use: Use) -> None:
    learner = use()
    guided = SamplingParams(
        temperature=0.0, max_tokens=24, ignore_eos=True, detokenize=False, prediction=list(range(40))
    )
    tokens(llm, params=guided)
    assert learner.now.drafts == 0
    tokens(llm)
    assert learner.now.drafts > 0


def test_requests_with_a_cache_salt_teach_nothing(llm: LLM, use: Use) -> None:
    learner = use()
    llm.generate([{"prompt_token_ids": ids, "cache_salt": "mine"} for ids in PROMPTS], GREEDY)
    assert (learner.texts.count, learner.now.drafts) == (0, 0)
    tokens(llm)
    assert learner.texts.count > 0 and learner.now.drafts > 0


@pytest.fixture(scope="module")
def builtin() -> LLM:
    return LLM("builtin", kv_cache_memory_bytes=1 << 26)


@pytest.mark.parametrize(
    "head", ["builtin-eagle", "builtin-eagle3", "builtin-medusa", "builtin-hydra", "builtin-draft"]
)
def test_a_copy_of_the_weights_drafts_the_same(builtin: LLM, tmp_path: Path, head: str) -> None:
    def run() -> list[Any]:
        outs = builtin.generate(["Once upon a time there was", "The sun is"], params)
        return [(out.outputs[0].text, out.speculation) for out in outs]

    params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
    builtin.use({"model": head, "adaptive": False})
    fixed, again = run(), run()  # trees of Medusa follow the ranks that were right before
    builtin.use({"model": head, "adaptive": False, "online": {"path": str(tmp_path / "learned")}})
    learner = builtin.engine.proposer.learner
    assert isinstance(learner, Learner)
    learner.earned = -1e9
    assert run() == fixed
    learner._swap(learner.candidate.weights())
    assert run() == again and learner.swaps == 1
