"""Learning from traffic: outputs stay, acceptance rises, the folder is always complete."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from toys import toy_target

from outrider import LLM, SamplingParams
from outrider.cli import main
from outrider.core.clock import Times
from outrider.core.row import Speculation
from outrider.core.step import Commit
from outrider.draft.eagle import Network
from outrider.errors import ConfigError
from outrider.online import learner as learners
from outrider.online import store, texts
from outrider.online.judging import Acceptance, Judgement, Score, Trial
from outrider.online.learner import Learner
from outrider.testing import random_model
from outrider.testing.checkpoints import TINY, VOCABULARY
from outrider.train.base import write_head

Use = Callable[..., Learner]
PROMPTS = [[(7 * i + j) % VOCABULARY for j in range(5)] for i in range(12)]
GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True, detokenize=False)
SEEDED = SamplingParams(temperature=0.8, seed=3, max_tokens=24, ignore_eos=True, detokenize=False)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(toy_target(tmp_path_factory.mktemp("target"), vocab_size=VOCABULARY))


@pytest.fixture(scope="module")
def llm(target: str) -> LLM:
    return LLM(target, dtype="float32", kv_cache_memory_bytes=1 << 24)


@pytest.fixture(scope="module")
def head(llm: LLM, tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("head")
    torch.manual_seed(0)
    network = Network.like(llm.engine.target, bias=False)
    write_head(folder, network.config(), network.state_dict())
    return str(folder)


@pytest.fixture
def use(llm: LLM, head: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Use:
    """Put the engine to use with learning; small rounds."""
    for name, value in {"ROUND": 24, "FIRST": 4, "HELD": 4, "DRAFTS": 20}.items():
        monkeypatch.setattr(learners, name, value)
    monkeypatch.setattr(texts, "HELD", 4)

    def make(model: str = "", **given: Any) -> Learner:
        online = {"path": str(tmp_path / "learned"), "share": 0.5, "rate": 5e-3, **given}
        drafter = {"model": model} if model else {"model": head, "tree": "chain"}
        llm.use({**drafter, "num_speculative_tokens": 3, "online": online})
        found = llm.engine.proposer.learner
        assert isinstance(found, Learner)
        return found

    return make


def tokens(llm: LLM, params: SamplingParams) -> list[list[int]]:
    return [list(out.outputs[0].token_ids) for out in llm.generate(PROMPTS, params)]


def serve(llm: LLM, learner: Learner, swaps: int) -> None:
    """Repeat the prompts until new weights were taken so many times.  Time is earned freely."""
    for _ in range(200):
        learner.earned = 1e9
        tokens(llm, GREEDY)
        if learner.swaps >= swaps:
            return
    raise AssertionError(f"only {learner.swaps} swaps")


def test_outputs_stay_and_acceptance_rises(llm: LLM, use: Use) -> None:
    llm.use(None)
    plain = tokens(llm, GREEDY), tokens(llm, SEEDED)
    learner = use()
    assert tokens(llm, GREEDY) == plain[0]
    first = Acceptance(learner.now.drafts, learner.now.accepted)
    serve(llm, learner, 3)
    learner.now, learner.earned = Acceptance(), -1e9
    assert tokens(llm, GREEDY) == plain[0], "learning never changes an output"
    assert learner.now.drafts > 100 and learner.now.share > first.share + 0.1
    assert tokens(llm, SEEDED) == plain[1]
    llm.engine.check()


def test_a_draft_model_learns(llm: LLM, use: Use, tmp_path: Path) -> None:
    draft = tmp_path / "draft"
    random_model("Llama", {**TINY, "vocab_size": VOCABULARY, "num_hidden_layers": 1}).save_pretrained(draft)
    llm.use(None)
    plain = tokens(llm, GREEDY), tokens(llm, SEEDED)
    learner = use(model=str(draft))
    assert tokens(llm, GREEDY) == plain[0]
    first = Acceptance(learner.now.drafts, learner.now.accepted)
    serve(llm, learner, 3)
    learner.now, learner.earned = Acceptance(), -1e9
    assert tokens(llm, GREEDY) == plain[0] and learner.now.share > first.share + 0.1
    learned = learner.now.share
    assert tokens(llm, SEEDED) == plain[1]
    llm.use({"model": str(tmp_path / "learned"), "num_speculative_tokens": 3})  # a draft model as any other
    outputs = llm.generate(PROMPTS, GREEDY)
    total = sum((out.outputs[0].speculation for out in outputs), Speculation())
    assert total.accepted_at[0] / total.drafts == pytest.approx(learned, abs=0.1)


def test_weights_survive_a_restart(llm: LLM, use: Use, head: str, tmp_path: Path) -> None:
    learner = use()
    serve(llm, learner, 2)
    weights, again = learner.in_use, use()
    assert again.swaps == learner.swaps
    assert all(torch.equal(weights[name], again.in_use[name]) for name in weights)
    folder = str(tmp_path / "learned")  # a head as any other
    llm.use({"model": folder, "tree": "chain", "num_speculative_tokens": 3})
    assert llm.engine.drafter.head.name == folder


def test_weights_are_taken_back_if_acceptance_falls(llm: LLM, use: Use, tmp_path: Path) -> None:
    learner = use()
    serve(llm, learner, 1)
    old, rest = learner.in_use, learner.rest
    learner.now = Acceptance(1000, 1000)
    learner._swap({name: torch.randn_like(tensor) for name, tensor in old.items()})
    for _ in range(20):
        learner.earned = -1e9  # nothing is trained meanwhile
        tokens(llm, GREEDY)
        if learner.returns:
            break
    assert learner.returns == 1 and learner.in_use is old
    assert learner.rest > rest, "no training before some further texts"
    assert torch.equal(learner.candidate.network.state_dict()["fc.weight"], old["fc.weight"])
    saved = reopened(learner).load()
    assert saved is not None and torch.equal(saved[0]["fc.weight"], old["fc.weight"])


def reopened(learner: Learner) -> store.Store:
    return store.Store(learner.store.path, learner.store.key["target"], learner.store.key["base"])


def test_training_time_is_bounded_and_charged(llm: LLM, use: Use) -> None:
    learner = use(share=0.2)
    for _ in range(3):
        tokens(llm, GREEDY)
    assert learner.active
    learner.earned = 0.0
    assert learner.charged(Times(1.0, 3.0, 4.0)) == Times(3.0, 3.0, 4.0), "a fifth of the whole is earned"
    assert learner.earned == pytest.approx(2.0)
    learner.train()
    spent = learner.taken()
    assert 0 < spent < 2 and learner.taken() == 0.0
    times = learner.charged(Times(1.0, 3.0, 4.0))
    assert sum(times) == pytest.approx(10.0) and learner.earned == pytest.approx(4.0 - spent)
    learner.earned = 0.0
    learner.train()
    assert learner.taken() < spent / 2, "nothing is left to spend"


def test_a_small_fall_is_looked_at_again_until_it_is_certain(llm: LLM, use: Use) -> None:
    learner = use()
    learner._swap(learner.candidate.weights())
    learner.trial, learner.now = Trial(Acceptance(1200, 660), 200), Acceptance(200, 98)
    learner.train()
    assert learner.old is not None, "0.49 of 200 drafts after 0.55 may be chance"
    learner.now = Acceptance(399, 180)
    learner.train()
    assert learner.old is not None and learner.returns == 0, (
        "looks at every draft would take chance for a fall"
    )
    learner.now = Acceptance(400, 196)
    learner.train()
    assert learner.old is None and learner.returns == 1


def test_a_trial_ends_at_once_if_acceptance_rose() -> None:
    assert Trial(Acceptance(1000, 500), 200).fallen(Acceptance(200, 101)) is False
    undecided = Trial(Acceptance(1000, 500), 200)
    for drafts in (200, 400, 800):
        assert undecided.fallen(Acceptance(drafts, drafts // 2 - 4)) is None
    assert undecided.fallen(Acceptance(1600, 796)) is False


def test_a_better_mean_of_few_texts_may_be_chance() -> None:
    def judged(*right: float, loss: float = 1.0) -> Judgement:
        return Judgement.of(20, 8, [Score(loss, one) for one in right], [Score(1.0, 0.5)] * len(right))

    assert not judged(0.7, 0.48, 0.49).better
    assert judged(0.52, 0.53, 0.51).better
    assert not judged(0.7, 0.7, loss=float("nan")).better
    assert not judged(0.5, 0.5, loss=0.9).better and judged(0.5, 0.5, loss=0.9).learning


@pytest.mark.parametrize("head", ["eagle", "eagle3", "medusa", "hydra", "draft"])
def test_weights_are_judged_by_the_tokens_that_they_draft(
    head: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The share of right first draft tokens on a text is that of the engine's drafts."""
    llm = LLM("builtin", kv_cache_memory_bytes=1 << 26)
    online = {"path": str(tmp_path / "learned")}
    tree = {} if head == "draft" else {"tree": "chain"}
    llm.use({"model": f"builtin-{head}", "num_speculative_tokens": 1, **tree, "online": online})
    learner = llm.engine.proposer.learner
    assert isinstance(learner, Learner)
    learner.earned = -1e9
    params = SamplingParams(temperature=0.0, max_tokens=96, ignore_eos=True)
    llm.generate(["Once upon a time there was", "The sun is", "def main(", "3 + 4"], params)
    found = [*learner.texts.kept, *learner.texts.held]
    scores = [learner.candidate.score(learner.in_use, learner.texts, text) for text in found]
    share = sum(score.right for score in scores) / len(scores)
    assert share == pytest.approx(learner.now.share, abs=0.15)


def test_what_nothing_was_learned_from_is_reported(
    llm: LLM, use: Use, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(learners, "PAUSE", 0.0)
    learner = use()
    short = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True)
    llm.generate([*PROMPTS[:2], {"prompt_token_ids": PROMPTS[0], "cache_salt": "mine"}], short)
    llm.generate(PROMPTS[:3], GREEDY)
    assert not learner.store.load()
    with pytest.raises(SystemExit, match="0"):
        main(["online", "show", str(learner.store.path)])
    text = capsys.readouterr().out
    assert "none: the published ones are in use" in text
    assert "collecting texts: 3 of 4 to train on, 0 of 4 held out" in text
    assert "2 too short, 1 with a cache_salt" in text


def test_learning_rests_when_no_candidate_is_better(
    llm: LLM, use: Use, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(learners, "ROUND", 2)
    monkeypatch.setattr(learners, "FIRST", 8)
    learner = use(rate=1e-12)
    for _ in range(20):
        learner.earned = 1e9
        tokens(llm, GREEDY)
        if learner.rest:
            break
    assert learner.swaps == 0 and learner.rest > 0 and len(learner.judgements) >= learners.MISSES
    assert "no candidate was better" in learners.state(learner)
    units = learner.units
    while learner.texts.count < learner.rest:
        assert learner.units == units, "a rest takes no time"
        tokens(llm, GREEDY)


def test_requests_that_began_with_the_old_weights_do_not_judge_new_ones(llm: LLM, use: Use) -> None:
    learner = use()
    learner.earned = -1e9
    swapped, observe = list[int](), learner.observe

    def observed(commit: Commit) -> None:
        observe(commit)
        if not swapped and learner.drafted:
            swapped.append(len(learner.drafted))
            learner._swap(learner.candidate.weights())

    learner.observe = observed  # type: ignore[method-assign]
    tokens(llm, GREEDY)
    assert swapped == [len(PROMPTS)] and learner.now.drafts == 0 and not learner.drafted
    tokens(llm, GREEDY)
    assert learner.now.drafts > len(PROMPTS)


def test_drafts_of_one_request_are_no_independent_evidence() -> None:
    before, now = Acceptance(), Acceptance()
    for request in range(60):
        before.add(20, 20 if request % 2 else 2)
    for request in range(10):
        now.add(20, 20 if request % 5 < 2 else 2)
    assert before.share - now.share > 0.08
    assert Acceptance(now.drafts, now.accepted).fell_since(Acceptance(before.drafts, before.accepted))
    assert not now.fell_since(before)


def test_chance_is_no_fall() -> None:
    assert not Acceptance(200, 95).fell_since(Acceptance(200, 100))
    assert Acceptance(200, 60).fell_since(Acceptance(200, 100))
    assert not Acceptance(200, 0).fell_since(Acceptance())


def test_a_damaged_file_is_ignored_and_another_head_refused(
    llm: LLM, use: Use, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    learner = use()
    serve(llm, learner, 1)
    kept = learner.store
    with pytest.raises(ConfigError, match=r"holds weights for another base: .*outrider online delete"):
        store.Store(kept.path, kept.key["target"], "another").load()
    file = kept.path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-4] + b"abcd")
    assert use().swaps == 0 and "is damaged" in caplog.text


def test_the_disk_is_bounded_and_can_be_deleted(
    llm: LLM, use: Use, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    learner = use()
    serve(llm, learner, 3)
    path = learner.store.path
    assert len(list(path.iterdir())) == 4, "weights, config.json, the report and the lock"
    with pytest.raises(SystemExit, match="0"):
        main(["online", "show", str(path), "--json"])
    shown = json.loads(capsys.readouterr().out)
    assert shown["weights"]["statistics"]["swaps"] >= 3 and shown["bytes"] > 1000
    with pytest.raises(SystemExit, match="0"):
        main(["online", "show", str(path)])
    text = capsys.readouterr().out
    assert "taken into use 3 times" in text and "better: " in text and "published: 0." in text
    with pytest.raises(SystemExit, match="0"):
        main(["online", "delete", str(path)])
    assert not path.exists()
    with pytest.raises(SystemExit, match="2"):
        main(["online", "show", str(path)])


KILLED = """
import sys, torch
from outrider.online.store import Store
store, i = Store(sys.argv[1], "t", "b"), 0
while True:
    i += 1
    store.save({}, {"x": torch.full((50_000,), float(i))}, {"number": i})
    print(i, flush=True)
"""


def test_a_kill_leaves_complete_weights(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", KILLED, str(tmp_path)], stdout=subprocess.PIPE, env={**os.environ}
    )
    assert process.stdout is not None
    for _ in range(5):
        process.stdout.readline()
    process.send_signal(signal.SIGKILL)
    process.wait()
    found = store.Store(tmp_path, "t", "b").load()
    assert found is not None, "the lock ended with the process"
    assert found[1]["number"] >= 5 and bool((found[0]["x"] == float(found[1]["number"])).all())


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"method": "ngram", "online": {"path": "x"}}, "no weights of its own that could learn"),
        ({"model": "self", "draft_kv_budget": 16, "online": {"path": "x"}}, "'self' is not trained while"),
        ({"model": "builtin-eagle", "online": {"share": 0.1}}, "online must be a dict"),
        ({"model": "builtin-eagle", "online": {"path": "x", "shar": 0.1}}, "Did you mean 'share'"),
        ({"model": "builtin-eagle", "online": {"path": "x", "share": 0.9}}, "at most 0.5"),
    ],
)
def test_options_are_checked(llm: LLM, config: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        llm.use(config)
