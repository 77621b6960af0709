"""The command line, run inside the test's own process: arguments in; status, output and errors out."""

from __future__ import annotations

import io
import json
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from commands import Result, Run, Started

from outrider.cli import main
from outrider.serve.options import ServerOptions
from outrider.testing import tiny_checkpoint


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """`run("generate", "-p", "x", stdin="…")`."""

    def call(*arguments: object, stdin: str = "") -> Result:
        monkeypatch.setattr("sys.stdin", io.StringIO(stdin))
        monkeypatch.setenv("COLUMNS", "160")
        capsys.readouterr()
        try:
            main([str(argument) for argument in arguments])
            status = 0
        except SystemExit as leaving:
            status = leaving.code if isinstance(leaving.code, int) else 0 if leaving.code is None else 1
        printed = capsys.readouterr()
        return Result(status, printed.out, printed.err)

    return call


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[Started]:
    """What would be served."""
    calls: list[Started] = []

    def start(options: ServerOptions, engine: Any, config: Any, threads: int | None) -> None:
        calls.append((options, engine, config))

    monkeypatch.setattr(import_module("outrider.cli.serve"), "start", start)  # the package has the command
    return calls


@pytest.fixture(scope="session")
def mute(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A tiny model with a tokenizer and without a chat template."""
    return tiny_checkpoint(tmp_path_factory.mktemp("mute"))


@pytest.fixture(scope="session")
def questions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Spec-Bench's question.jsonl in small: two categories, two turns, and a question that is too long."""
    rows = [
        {
            "question_id": 1,
            "category": "qa",
            "turns": ["What do plants need in order to grow?"],
            "reference": [],
        },
        {
            "question_id": 2,
            "category": "writing",
            "turns": ["Write a letter to a friend.", "Make it shorter."],
        },
        {"question_id": 3, "category": "qa", "turns": ["Can a person see a star in the daytime?"]},
        {"question_id": 4, "category": "qa", "turns": ["word " * 3000]},
    ]
    path = tmp_path_factory.mktemp("eval") / "question.jsonl"
    path.write_text("\n".join(json.dumps(row) for row in rows) + "\n")
    return path
