"""Runs of every method on a tiny target: what is learnt, saved, resumed and served."""

from __future__ import annotations

import io
import json
import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from full_disk import full_disk
from rich.console import Console
from safetensors.torch import load_file

from outrider import LLM, SamplingParams
from outrider.checkpoints.heads import Head
from outrider.core.step import FINAL
from outrider.errors import ConfigError
from outrider.heads.base import FINGERPRINT
from outrider.heads.sample import read_states
from outrider.train import answers, features, run
from outrider.train.data import Item
from outrider.train.loop import Trainer
from outrider.train.methods import method, methods
from outrider.train.processes import Processes
from outrider.train.report import Report
from outrider.train.run import Result, train

SMALL: dict[str, dict[str, Any]] = {
    "eagle3": {"draft_vocab_size": 200, "test_steps": 2, "inner": 96},
    "griffin": {"inner": 96, "test_steps": 2},
    "medusa": {"rate": 1e-2, "steps": 50, "heads": 2},
    "hydra": {"rate": 1e-2, "heads": 2, "layers": 2, "inner": 96, "dropout": 0.0},
    "mlp_speculator": {"rate": 1e-2},
    "redrafter": {"rate": 1e-2, "layers": 1},
    "mtp": {"inner": 96, "test_steps": 2},
    "dflash": {"rate": 1e-2, "block": 3, "layers": 1, "inner": 96},
    "peagle": {"draft_vocab_size": 200, "depths": 2, "layers": 1, "inner": 96},
    "draft_model": {"layers": 2},
    "pard": {"layers": 2, "depths": 3, "rate": 3e-3},
    "layerskip": {"early_exit": 3, "rate": 1e-2},
}
PROMPTS = [{"prompt": text} for text in ("the cat", "ten men", "it is", "rain")]
PARAMS = [SamplingParams(temperature=t, seed=3, max_tokens=20, ignore_eos=True) for t in (0.0, 0.8) * 2]


class Killed(BaseException):
    """As if the process had been ended."""


@pytest.mark.parametrize("name", sorted(methods()))
def test_a_short_run_raises_acceptance_and_leaves_the_text(
    name: str, target: LLM, run_options: Any, tmp_path: Path
) -> None:
    result = train(target, name, run_options(name, tmp_path / "out", **SMALL.get(name, {})), Report())
    first, last = result.records[0], result.records[-1]
    assert result.finished and last["step"] == len(result.losses)
    assert last["held_loss"] < 0.95 * first["held_loss"]
    assert last["tokens_per_step"] > max(1.05, first["tokens_per_step"])
    expected = target.generate(PROMPTS, PARAMS)
    config = {"model": str(tmp_path / "out"), "num_speculative_tokens": 2}
    if name == "layerskip":
        config = {"method": name, "exit_head": str(tmp_path / "out"), "exit_threshold": None}
    found = target.variant(config).generate(PROMPTS, PARAMS)
    assert [out.outputs[0].token_ids for out in found] == [out.outputs[0].token_ids for out in expected]
    assert sum(out.outputs[0].speculation.accepted for out in found) > 0


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_killed_run_goes_on_with_equal_weights(
    optimizer: str, target: LLM, run_options: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed after step 7, the last checkpoint is of step 5.  EAGLE's loss draws noise."""

    def trained(folder: str) -> Result:
        given = {"steps": 12, "checkpoint_every": 5, "evaluate_every": 4, "optimizer": optimizer}
        given = run_options("eagle", tmp_path / folder, **given)
        return train(target, "eagle", given, Report())

    whole, advance = trained("whole"), Trainer.advance

    def killing(self: Trainer) -> float:
        if self.step == 7:
            raise Killed
        return advance(self)

    monkeypatch.setattr(Trainer, "advance", killing)
    with pytest.raises(Killed):
        trained("killed")
    monkeypatch.undo()
    loaded: list[bool] = []
    load = Trainer.load
    monkeypatch.setattr(Trainer, "load", lambda self: loaded.append(load(self)) or loaded[-1])
    resumed = trained("killed")
    assert loaded == [True] and len(resumed.losses) == 12
    assert resumed.losses == whole.losses and resumed.records == whole.records
    one, other = (load_file(tmp_path / name / "model.safetensors") for name in ("whole", "killed"))
    assert one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)


def test_the_time_ends_answers_and_features(
    target: LLM, run_options: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was answered and computed before stays."""
    options = run_options("eagle", tmp_path / "out", steps=1, cache=str(tmp_path / "cache"), minutes=10)
    for module, answered in (
        (answers, 32),
        (features, 40),
    ):  # the time is over when it is looked at for the third time
        clock = iter([0.0, 0.0, math.inf])
        with monkeypatch.context() as patched:
            patched.setattr(module, "time", SimpleNamespace(perf_counter=lambda clock=clock: next(clock)))
            assert train(target, "eagle", options, Report()) == Result(False, [], [])
        (file,) = (tmp_path / "cache").glob("answers-*.jsonl")
        assert len(file.read_text().splitlines()) == answered
    (done,) = (tmp_path / "cache").glob("features-*/done.json")
    assert json.loads(done.read_text()) == {"texts": 3}
    assert not (tmp_path / "out" / "model.safetensors").exists()
    assert train(target, "eagle", options, Report()).finished


def test_a_run_that_ends_in_time_goes_on(target: LLM, run_options: Any, tmp_path: Path) -> None:
    assert train(target, "medusa", run_options("medusa", tmp_path / "first", steps=1), Report()).finished
    stopped = train(target, "medusa", run_options("medusa", tmp_path, steps=6, minutes=1e-9), Report())
    assert not stopped.finished and not stopped.losses
    assert (tmp_path / "model.safetensors").exists()
    assert len(train(target, "medusa", run_options("medusa", tmp_path, steps=6), Report()).losses) == 6


def test_another_run_in_the_folder_is_refused_before_the_target_answers(
    target: LLM, run_options: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The refusal came after hours of answers."""
    train(target, "medusa", run_options("medusa", tmp_path, steps=1), Report())
    monkeypatch.setattr(answers, "answered", pytest.fail)
    with pytest.raises(ConfigError, match="other values of batch, seed"):
        train(target, "medusa", run_options("medusa", tmp_path, steps=1, seed=1, batch=3), Report())
    with pytest.raises(ConfigError, match="a run of the method 'medusa'"):
        train(target, "eagle", run_options("eagle", tmp_path, steps=1), Report())
    checkpoint = tmp_path / "work" / "checkpoint.pt"
    checkpoint.write_bytes(checkpoint.read_bytes()[:1000])
    with pytest.raises(ConfigError, match=r"checkpoint\.pt' cannot be read .* remove it"):
        train(target, "medusa", run_options("medusa", tmp_path, steps=1), Report())


def test_a_full_disk_is_reported_with_the_name_of_the_file(
    target: LLM, run_options: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainers = list[Trainer]()

    def keep(trainer: Trainer) -> bool:
        trainers.append(trainer)
        return False

    with monkeypatch.context() as patched:
        patched.setattr(Trainer, "load", keep)
        train(target, "medusa", run_options("medusa", tmp_path, steps=1), Report())
    with full_disk(), pytest.raises(OSError, match=r"checkpoint\.pt' cannot be written"):
        trainers[0].save()
    with full_disk(64), pytest.raises(OSError, match=r"answers-\w+\.jsonl' cannot be written"):
        options = run_options("medusa", tmp_path, steps=1, cache=str(tmp_path / "cache"))
        train(target, "medusa", options, Report())
    with full_disk(), pytest.raises(OSError, match=r"model\.safetensors\S* cannot be written"):
        trainers[0].method.save(tmp_path)


def test_a_checkpoint_with_parameters_in_another_order_is_refused(
    target: LLM, run_options: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The states of optimizers are kept by their order."""
    options = run_options("medusa", tmp_path, steps=2, checkpoint_every=1)
    advance, done = Trainer.advance, iter([False, True])

    def killing(self: Trainer) -> float:
        if next(done):
            raise Killed
        return advance(self)

    with monkeypatch.context() as patched, pytest.raises(Killed):
        patched.setattr(Trainer, "advance", killing)
        train(target, "medusa", options, Report())
    path = options.work / "checkpoint.pt"
    state = torch.load(path)
    state["network"] = dict(reversed(state["network"].items()))
    torch.save(state, path)
    with pytest.raises(ConfigError, match="another version of this method"):
        train(target, "medusa", options, Report())


def test_answers_and_features_are_computed_once(
    target: LLM, run_options: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = {"steps": 1, "cache": str(tmp_path / "cache")}
    made = [train(target, "eagle", run_options("eagle", tmp_path / "0", **given), Report())]
    (answers,) = (tmp_path / "cache").glob("answers-*.jsonl")
    answers.write_text(answers.read_text()[:-9])  # a kill while the last line was written
    asked: list[int] = []
    answered = run.answers.answered

    def counting(llm: LLM, items: Any, *more: Any) -> Any:
        asked.append(len(items))
        return answered(llm, items, *more)

    monkeypatch.setattr(run.answers, "answered", counting)
    made.append(train(target, "eagle", run_options("eagle", tmp_path / "1", **given), Report()))
    assert asked == [1]

    def refuse(*_: Any) -> None:
        raise AssertionError("states are computed again")

    monkeypatch.setattr("outrider.train.features.read_states", refuse)
    made.append(train(target, "eagle", run_options("eagle", tmp_path / "2", **given), Report()))
    monkeypatch.undo()
    without = {**given, "cache_gb": 0.0}
    made.append(train(target, "eagle", run_options("eagle", tmp_path / "3", **without), Report()))
    assert len({result.losses[0] for result in made}) == 1


def test_states_of_texts_read_together_are_those_of_each(
    target: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chunks of 16 tokens end within texts."""
    monkeypatch.setattr("outrider.heads.sample.HOST_CHUNK", 16)
    model = target.engine.decoder
    texts = [[(7 * i + j) % 90 + 5 for j in range(n)] for i, n in enumerate((9, 30, 1, 16))]
    together = read_states(model, texts, (1, FINAL))
    for which, states in together.items():
        each = [read_states(model, [text], (which,))[which] for text in texts]
        assert torch.equal(states, torch.cat(each))


def test_failed_answers_are_asked_for_again(target: LLM, run_options: Any, tmp_path: Path) -> None:
    options, path = run_options("medusa", tmp_path), tmp_path / "answers.jsonl"
    items = [Item([5, 6, 7], []), Item([10**6], [])]  # the second is no token of the target
    failed: list[int] = []
    for _ in range(2):
        file = answers.AnswerFile(path, items)
        file.ask(target, options, lambda *_: None, lambda i, _: failed.append(i))
        texts = file.texts
        assert len(texts[0].ids) > 3 and len(texts[1].ids) == texts[1].prompt
    assert failed == [1, 1] and len(path.read_text().splitlines()) == 1
    assert answers.AnswerFile(path, items).texts == texts, "another process reads what the first has"


def test_processes_at_different_steps_are_refused(
    target: LLM, run_options: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = run_options("medusa", tmp_path / "out", steps=1)
    monkeypatch.setattr(Processes, "same", lambda self, key: key != "0")
    with pytest.raises(ConfigError, match="different answers or checkpoints"):
        train(target, "medusa", options, Report())
    with pytest.raises(ConfigError, match="different answers or checkpoints"):
        run.collect(target, replace(options, cache=str(tmp_path / "own")), Report(), math.inf, ask=False)


def test_only_one_run_writes_to_a_folder(target: LLM, run_options: Any, tmp_path: Path) -> None:
    options = run_options("medusa", tmp_path / "out", steps=1, cache=str(tmp_path / "cache"))
    with run.only_writer(tmp_path / "cache"), pytest.raises(ConfigError, match="another run writes answers"):
        train(target, "medusa", options, Report())
    with run.only_run(options), pytest.raises(ConfigError, match="another run trains in"):
        train(target, "medusa", options, Report())
    assert train(target, "medusa", options, Report()).finished, "and goes on when it is free"


def test_the_result_tells_where_it_came_from(
    target: LLM, run_options: Any, corpus: Path, tmp_path: Path
) -> None:
    bad = tmp_path / "bad.jsonl"
    bad.write_bytes(b'{"text": "the cat sat on the mat"}\nno json\n{"text": "\xff"}\n')
    given = run_options("medusa", tmp_path / "out", data=(str(corpus), str(bad)), steps=2, own=False)
    train(target, "medusa", given, Report(Console(file=io.StringIO())))
    record = json.loads((tmp_path / "out" / "training.json").read_text())
    assert record["target"]["fingerprint"] == target.engine.checkpoint.fingerprint
    assert [source["lines"] for source in record["data"]] == [40, 3]
    assert [line.split(":")[0] for line in record["data"][1]["bad"]] == ["line 2", "line 3"]
    assert len(record["data"][0]["sha256"]) == 64 and record["options"]["seed"] == 0 and record["steps"] == 2
    head = Head.open(str(tmp_path / "out"))
    assert head.config[FINGERPRINT] == target.engine.checkpoint.fingerprint
    assert (tmp_path / "out" / "acceptance.png").exists() and (tmp_path / "out" / "loss.png").exists()


def test_an_evaluation_without_accepted_drafts_is_shown() -> None:
    shown = io.StringIO()
    record = {"step": 0, "held_loss": 1.5, "by_depth": [], "tokens_per_step": 1.0}
    Report(Console(file=shown)).evaluated(record)
    assert shown.getvalue() == "step 0: held-out loss 1.500, accepted 0.00, 1.00 tokens/step\n"


def test_other_layouts_and_bits_are_served(target: LLM, run_options: Any, tmp_path: Path) -> None:
    for i, given in enumerate(({"format": "vllm"}, {"quantization": "int8", "own": False})):
        folder = tmp_path / str(i)
        train(target, "medusa", run_options("medusa", folder, steps=1, **given), Report())
        target.variant({"model": str(folder), "num_speculative_tokens": 2})
    given = run_options("draft_model", tmp_path / "2", steps=1, quantization="int8", hidden=80, inner=96)
    train(target, "draft_model", given, Report())  # 80 inputs are no multiple of the group
    target.variant({"method": "draft_model", "model": str(tmp_path / "2"), "num_speculative_tokens": 2})
    assert "blocks.0.layers.0.weight" in Head.open(str(tmp_path / "0"))
    assert "quantization_config" in Head.open(str(tmp_path / "1")).config


def test_a_run_starts_from_an_earlier_head(target: LLM, run_options: Any, tmp_path: Path) -> None:
    for i, bits in enumerate((None, "int8")):
        old, new = tmp_path / f"old{i}", tmp_path / f"new{i}"
        given = run_options("medusa", old, steps=10, own=False, quantization=bits)
        first = train(target, "medusa", given, Report())
        given = run_options("medusa", new, steps=1, own=False, init=str(old))
        second = train(target, "medusa", given, Report())
        assert second.records[0]["held_loss"] == pytest.approx(first.records[-1]["held_loss"], rel=0.02)
        assert second.records[0]["held_loss"] < 0.98 * first.records[0]["held_loss"]
    with pytest.raises(ConfigError, match=r"no fc\.weight"):
        train(target, "eagle", run_options("eagle", tmp_path / "c", init=str(tmp_path / "old0")), Report())
    with pytest.raises(ConfigError, match="no head of this shape"):
        train(target, "eagle", run_options("eagle", tmp_path / "c", steps=1, init="nowhere"), Report())


def test_bfloat16_training_learns(target: LLM, run_options: Any, tmp_path: Path) -> None:
    given = run_options("medusa", tmp_path, dtype="bfloat16", own=False, steps=15)
    first, last = train(target, "medusa", given, Report()).records
    assert last["held_loss"] < 0.95 * first["held_loss"]


def test_mistakes_are_refused_by_name(run_options: Any, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="Did you mean 'medusa'"):
        method("medussa")
    with pytest.raises(ConfigError, match="Did you mean 'heads'"):
        run_options("medusa", tmp_path, haeds=3)
    for wrong in ({"dtype": "float16"}, {"temperatures": ()}, {"data": ()}, {"quantization": "int3"}):
        with pytest.raises(ConfigError):
            run_options("medusa", tmp_path, **wrong)
    for name, wrong in (
        ("medusa", {"heads": 0}), ("hydra", {"dropout": 1.0}), ("dflash", {"block": 1}),
        ("layerskip", {"early_exit": "3"}), ("eagle3", {"taps": 3}), ("eagle", {"temperatures": 0.5}),
        ("dflash", {"markov_kind": "gated"}), ("dflash", {"markov_kind": "rnn", "domino": 8}),
        ("dflash", {"selector": 8, "domino": 8}),
    ):  # fmt: skip
        with pytest.raises(ConfigError, match=next(iter(wrong))):
            run_options(name, tmp_path, **wrong)
    assert method("eagle2") is method("eagle")


def test_a_folder_of_another_model_is_refused_and_left_alone(
    target: LLM, run_options: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run, "collect", lambda *_: pytest.fail("the data is read"))
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(b"of a model")
    with pytest.raises(ConfigError, match="no run of this command"):
        train(target, "medusa", run_options("medusa", tmp_path), Report())
    assert weights.read_bytes() == b"of a model" and [*tmp_path.iterdir()] == [weights]


def test_a_head_that_another_method_makes_is_named() -> None:
    with pytest.raises(ConfigError, match="'dspark' is trained by 'dflash' with the option 'markov'"):
        method("dspark")


@pytest.mark.parametrize(
    ("name", "wrong"),
    [("eagle3", {"taps": [99]}), ("dflash", {"mask_token": 10**6}), ("medusa", {"format": "nothing"})],
)
def test_what_does_not_fit_the_target_is_refused_before_its_answers(
    name: str, wrong: Any, target: LLM, run_options: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run, "collect", lambda *_: pytest.fail("the data is read"))
    with pytest.raises(ConfigError, match=r"taps|mask_token|layout"):
        train(target, name, run_options(name, tmp_path, **wrong), Report())
