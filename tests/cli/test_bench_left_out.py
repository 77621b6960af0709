"""`outrider bench` with prompts that cannot be read, and ended by Ctrl-C."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from commands import Run

from outrider.bench import rounds
from outrider.bench.measure import PLAIN
from outrider.bench.measure import Run as Group

FAST = ("-n", 8, "--method", "ngram", "--draft", 2)


def test_broken_lines_are_named_and_counted(run: Run, tmp_path: Path) -> None:
    """The first one ended the measurement."""
    path, out = tmp_path / "question.jsonl", tmp_path / "figures.jsonl"
    lines = ['{"turns": ["What is water?"]}', "{", '{"turns": []}', '{"turns": ["Why is it wet?"]}']
    path.write_text("\n".join(lines))
    result = run("bench", path, "-n", 2, "--ignore-eos", "--repeats", 1, "--json", out)
    assert result.status == 0, result.err
    assert "line 2: no JSON" in result.err and "line 3: neither" in result.err
    assert "could not be read: 2." in result.out and "all 2 prompts" in result.out
    assert json.loads(out.read_text())["left out, unread"] == 2
    path.write_text("\n".join(["{"] * 30))
    result = run("bench", path, "-n", 2)
    assert result.status == 2 and "holds no prompts" in result.err
    assert result.err.count("no JSON") == 20


def interrupt(monkeypatch: pytest.MonkeyPatch, after: int) -> None:
    """Have Ctrl-C come during a later run than these."""
    done = []

    def once(*arguments: Any, **more: Any) -> Group:
        if len(done) == after:
            raise KeyboardInterrupt
        done.append(arguments[1])
        return measure_once(*arguments, **more)

    measure_once = rounds.once
    monkeypatch.setattr(rounds, "once", once)


# 2 runs to warm up, then for each group 2 runs of 2 methods; a second round begins behind 2 + 12 runs
@pytest.mark.parametrize(("after", "prompts"), [(6, 1), (9, 1), (11, 2), (14, 3), (27, 3)])
def test_ctrl_c_ends_with_the_results_so_far(
    run: Run, questions: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, after: int, prompts: int
) -> None:
    out = tmp_path / "figures.jsonl"
    interrupt(monkeypatch, after)
    result = run("bench", questions, *FAST, "--json", out)
    assert result.status == 130 and "Interrupted" in result.out, result.err
    found = json.loads(out.read_text())
    assert found["interrupted"] is True
    assert all(len(each["tokens"]) == prompts for each in found["requests"].values())
    assert list(found["results"]) == [PLAIN, "ngram"]


def test_ctrl_c_before_any_result_ends_at_once(
    run: Run, questions: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "figures.jsonl"
    interrupt(monkeypatch, 5)
    result = run("bench", questions, *FAST, "--json", out)
    assert result.status == 130 and not result.out.strip() and not out.read_text()
