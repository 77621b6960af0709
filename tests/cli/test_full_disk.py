"""A full disk: every command names the file that it could not write, and the cure, in one line."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from errno import ENOSPC, EOPNOTSUPP
from pathlib import Path
from typing import Any

import pytest
from commands import Run
from safetensors import SafetensorError

from outrider.cli.bench import print_line
from outrider.errors import ConfigError, writing

CURE = "cannot be written: the disk is full: free space on it, or write to another one."
OF_SAFETENSORS = "Error while serializing: I/O error: No space left on device (os error 28)"
no_dev_full = pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")


def full(*_: object, **__: object) -> Any:
    raise OSError(ENOSPC, os.strerror(ENOSPC))


def full_for_safetensors(*_: object, **__: object) -> Any:
    raise SafetensorError(OF_SAFETENSORS)


@pytest.fixture
def data(tmp_path: Path) -> Path:
    path = tmp_path / "data.jsonl"
    path.write_text("".join(json.dumps({"text": f"the cat {n} sat on the mat"}) + "\n" for n in range(12)))
    return path


def test_the_file_is_named_with_and_without_a_name_in_the_error() -> None:
    for error in (OSError(ENOSPC, "full"), OSError(ENOSPC, "full", "a"), SafetensorError(OF_SAFETENSORS)):
        with pytest.raises(OSError, match=f"^'a' {CURE}$"), writing("a", SafetensorError):
            raise error
    with pytest.raises(PermissionError, match="denied"), writing("a"):
        raise PermissionError(13, "denied", "b")


@pytest.mark.parametrize(
    ("patched", "with_", "file"),
    [
        ("pathlib.Path.write_text", full, "config.json"),
        ("shutil.copyfile", full, "tokenizer"),
        ("safetensors.torch.save_file", full_for_safetensors, "model.safetensors"),
    ],
)
def test_quantize_to_a_full_disk_names_file_and_cure(
    run: Run, mute: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, patched: str, with_: Any, file: str
) -> None:
    monkeypatch.setattr(patched, with_)
    done = run("quantize", "-m", mute, "-o", tmp_path / "q")
    assert done.status == 2 and done.err.startswith(f"error: '{tmp_path / 'q' / file}")
    assert done.err.endswith(f"' {CURE}\n")


def test_export_to_a_full_disk_names_file_and_cure(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("safetensors.torch.save_file", full_for_safetensors)
    done = run("export", "builtin-eagle", "--format", "vllm", "--out", tmp_path / "e")
    assert done.status == 2
    assert done.err == f"error: '{tmp_path / 'e' / 'model.safetensors.tmp'}' {CURE}\n"


@pytest.mark.parametrize(
    ("patched", "with_", "file"),
    [
        ("os.fsync", full, "answers-"),
        ("os.posix_fallocate", full, "states.bin"),
        ("torch.save", full, "checkpoint.pt"),
        ("safetensors.torch.save_file", full_for_safetensors, "model.safetensors"),
    ],
)
def test_training_on_a_full_disk_names_file_and_cure(
    run: Run,
    mute: str,
    data: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    patched: str,
    with_: Any,
    file: str,
) -> None:
    monkeypatch.setattr(patched, with_)
    short = ("--steps", 1, "--batch", 2, "--options", '{"prompt_tokens": 6, "heads": 2, "answer_tokens": 12}')
    done = run("train", "medusa", "-m", mute, "--data", data, "--out", tmp_path / "head", *short)
    assert done.status == 2 and file in done.err and done.err.endswith(f"' {CURE}\n"), done.err
    assert done.err.count("\n") == 1


def test_a_file_system_that_cannot_allocate_is_written_all_the_same(
    run: Run, mute: str, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: Any) -> None:
        raise OSError(EOPNOTSUPP, os.strerror(EOPNOTSUPP))

    monkeypatch.setattr("os.posix_fallocate", refused)
    short = ("--steps", 1, "--batch", 2, "--options", '{"prompt_tokens": 6, "heads": 2, "answer_tokens": 12}')
    assert run("train", "medusa", "-m", mute, "--data", data, "--out", tmp_path / "head", *short).status == 0


def test_search_results_on_a_full_disk_name_the_cure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from outrider.control.module import Network
    from outrider.drafting.disco import Classifier

    for module in ("control.module", "drafting.disco"):
        monkeypatch.setattr(f"outrider.{module}.save_file", full_for_safetensors)
    network = Network(*[None] * 4, (), {})  # type: ignore[arg-type]
    for made, file in ((network, tmp_path / "c"), (Classifier(4), str(tmp_path / "d"))):
        with pytest.raises(ConfigError, match="the disk is full: free space on it"):
            made.save(file)  # type: ignore[attr-defined]


@no_dev_full
def test_answers_of_a_batch_to_a_full_disk_name_file_and_cure(run: Run, tmp_path: Path) -> None:
    asked = tmp_path / "requests.jsonl"
    body = {"prompt": "Once", "max_tokens": 2}
    request = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": body}
    asked.write_text(json.dumps(request))
    done = run("run-batch", "builtin", "-i", asked, "-o", "/dev/full")
    assert done.status == 2 and done.err.endswith(f"error: '/dev/full' {CURE}\n"), done.err


def test_resume_of_a_batch_on_a_full_disk_leaves_the_answers(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, out = tmp_path / "requests.jsonl", tmp_path / "answers.jsonl"
    asked.write_text("")
    out.write_text(text := json.dumps({"custom_id": "a", "response": {"status_code": 429}}) + "\n")
    monkeypatch.setattr("os.fsync", full)
    done = run("run-batch", "builtin", "-i", asked, "-o", out, "--resume")
    assert done.status == 2 and done.err == f"error: {str(out)!r} {CURE}\n", done.err
    assert out.read_text() == text and {*tmp_path.iterdir()} == {asked, out}


@no_dev_full
def test_json_of_a_benchmark() -> None:
    with pytest.raises(OSError, match=f"^'/dev/full' {CURE}$"), open("/dev/full", "a") as sink:
        try:
            print_line({"a": 1}, sink)
        finally:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sink.fileno())


@no_dev_full
@pytest.mark.parametrize("words", ["generate hello -n 4", "models", "generate --help"])
def test_full_standard_output_is_one_error_line(words: str) -> None:
    with open("/dev/full", "w") as sink:
        command = [sys.executable, "-m", "outrider", *words.split()]
        done = subprocess.run(command, stdout=sink, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 2
    assert done.stderr.endswith(f"error: standard output {CURE}\n") and "Traceback" not in done.stderr
