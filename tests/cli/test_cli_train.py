"""`outrider train`."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from commands import Run

from outrider.draft import detect
from outrider.errors import ConfigError
from outrider.train.loop import Trainer
from outrider.train.processes import Processes


@pytest.fixture
def data(tmp_path: Path) -> Path:
    path = tmp_path / "data.jsonl"
    path.write_text(
        "".join(json.dumps({"text": f"the cat {n} sat on the mat"}) + "\n" for n in range(12)) + "x\n"
    )
    return path


def test_a_head_is_trained_and_its_run_reported(run: Run, mute: str, data: Path, tmp_path: Path) -> None:
    short = (
        "--steps",
        2,
        "--batch",
        2,
        "--answer-tokens",
        12,
        "--options",
        '{"prompt_tokens": 6, "heads": 2}',
    )
    done = run("train", "medusa", "-m", mute, "--data", data, "--out", tmp_path / "head", *short)
    assert done.status == 0, done.err
    assert "12 of 13 lines" in done.out and "left out, line 13: no JSON" in done.out
    assert "tokens/step" in done.out and "answer tokens/s" in done.out and "optimizer" in done.out
    assert detect(str(tmp_path / "head")) == "medusa"
    again = run("train", "medusa", "-m", mute, "--data", data, "--out", tmp_path / "head", *short)
    assert again.status == 0 and "going on after step 2" in again.out


def test_ctrl_c_keeps_the_checkpoint_and_prints_how_to_resume(
    run: Run, mute: str, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = '{"prompt_tokens": 6, "heads": 2, "checkpoint_every": 1, "answer_tokens": 12}'
    given = ("-m", mute, "--data", data, "--steps", 3, "--batch", 2, "--options", sizes)
    advance = Trainer.advance

    def pressed(trainer: Trainer) -> float:
        if trainer.step == 2:
            raise KeyboardInterrupt
        return advance(trainer)

    monkeypatch.setattr(Trainer, "advance", pressed)
    stopped = run("train", "medusa", *given, "--out", tmp_path / "head")
    assert (stopped.status, stopped.err) == (130, "")
    last = stopped.out.splitlines()[-1]
    assert last == f"Stopped: the same command goes on from what is saved in {tmp_path / 'head' / 'work'}."
    monkeypatch.undo()
    again = run("train", "medusa", *given, "--out", tmp_path / "head")
    assert again.status == 0 and "going on after step 2" in again.out


def test_the_estimate_writes_nothing(run: Run, mute: str, data: Path, tmp_path: Path) -> None:
    given = ("--data", data, "--out", tmp_path / "head", "--options", '{"prompt_tokens": 6}', "--estimate")
    done = run("train", "eagle", "-m", mute, "--answer-tokens", 12, *given)
    assert done.status == 0, done.err
    for part in ("answers", "features", "loss", "optimizer", "MB on disk", "together"):
        assert part in done.out
    assert not (tmp_path / "head").exists()


def test_a_process_has_its_device_before_the_model(
    run: Run, mute: str, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []

    def load(*_: object, **__: object) -> None:
        done.append("load")
        raise ConfigError("enough")

    monkeypatch.setattr(Processes, "joined", lambda: done.append("join") or Processes())
    monkeypatch.setattr(sys.modules["outrider.cli.train"], "load", load)
    run("train", "medusa", "-m", mute, "--data", data, "--out", tmp_path / "head")
    assert done == ["join", "load"]


def test_mistakes_are_one_line(run: Run, mute: str, data: Path, tmp_path: Path) -> None:
    given = ("-m", mute, "--data", data, "--out", tmp_path / "head")
    done = run("train", "eagel", *given)
    assert done.status == 2 and "Did you mean 'eagle'" in done.err
    done = run("train", "eagle", *given, "--options", '{"heads": 2}')
    assert done.status == 2 and "training option" in done.err
    done = run("train", "eagle", *given, "--options", "[]")
    assert done.status == 2 and "--options must be" in done.err
    done = run("train", "eagle", "-m", mute, "--data", data, "--out", tmp_path / "no" / "head")
    assert done.status == 2 and "there is no folder" in done.err


@pytest.mark.parametrize(
    "command", [["train", "eagle", "--out", "x", "--target"], ["estimate"], ["tune"]], ids=str
)
def test_two_models_are_refused(run: Run, data: Path, command: list[str]) -> None:
    """-m builtin was ignored."""
    more = ("--data", data) if "train" in command else ()
    refused = run(*command, "here", "-m", "builtin", *more, *(("-md", "builtin-draft") if not more else ()))
    assert refused.status == 2 and "given twice, as 'here' and as 'builtin'" in refused.err, refused.err
