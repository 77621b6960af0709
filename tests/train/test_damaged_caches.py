"""Damaged or incomplete files of a cache: what is missing is computed again, and the weights are the same."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from outrider import LLM
from outrider.errors import ConfigError
from outrider.train import answers
from outrider.train.answers import Text
from outrider.train.features import States
from outrider.train.report import Report
from outrider.train.run import train


def cut(path: Path) -> None:
    """Leave half of the file."""
    os.truncate(path, path.stat().st_size // 2)


def written(text: str) -> Callable[[Path], object]:
    return lambda path: path.write_text(text)


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        ("states.bin", Path.unlink),
        ("states.bin", cut),
        ("done.json", written("")),
        ("done.json", written("[]")),
        ("done.json", written('{"texts": -3}')),
        ("done.json", written('{"texts": "all"}')),
        ("done.json", written('{"texts": 1e999}')),
    ],
)
def test_features_without_one_of_their_files_are_computed_again(
    name: str, damage: Callable[[Path], object], target: LLM, run_options: Any, tmp_path: Path
) -> None:
    """A run went on with zeros in place of the states that were missing."""
    given = {"steps": 2, "cache": str(tmp_path / "cache")}
    first = train(target, "eagle", run_options("eagle", tmp_path / "0", **given), Report())
    (folder,) = (tmp_path / "cache").glob("features-*")
    damage(folder / name)
    again = train(target, "eagle", run_options("eagle", tmp_path / "1", **given), Report())
    assert again.losses == first.losses and again.records == first.records


class Killed(BaseException):
    pass


def states_of(folder: Path, monkeypatch: pytest.MonkeyPatch, most: int) -> States:
    """States of ten texts, 1 to 10; the run is killed in the place of the text after so many."""
    computed: list[int] = []

    def compute(states: States, numbers: Sequence[int]) -> torch.Tensor:
        computed.extend(numbers)
        if len(computed) > most:
            raise Killed
        return torch.cat([torch.full((4, 8), i + 1.0) for i in numbers]).to(torch.bfloat16)

    monkeypatch.setattr(States, "_computed", compute)
    model: Any = SimpleNamespace(spec=SimpleNamespace(hidden=8), device=torch.device("cpu"))
    return States(model, [Text([i] * 4, 1) for i in range(10)], [0], folder, 1e9)


def test_features_are_computed_again_after_a_cut_file_and_a_kill(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file had its full size again, and the count of before took its zeros for states."""
    states_of(tmp_path, monkeypatch, 10).fill(lambda texts: None)
    cut(tmp_path / "states.bin")
    with pytest.raises(Killed):
        states_of(tmp_path, monkeypatch, 2).fill(lambda texts: None)
    states = states_of(tmp_path, monkeypatch, 10)
    states.fill(lambda texts: None)
    assert states.store is not None
    assert states.store[::4, 0].tolist() == [*range(1, 11)]


def test_damaged_answers_are_asked_for_again(tmp_path: Path) -> None:
    path = tmp_path / "answers.jsonl"
    bad = [b"\0" * 9, b"[3,", b"[3, 4]", b"{}", b"7", b"", b"\xff\xfe", b'["a", [1]]', b'[4, ["b"]]']
    path.write_bytes(b"\n".join([b"[0, [5, 6]]", *bad, b"[9, [7]]", b"[10, [8"]))
    assert answers.AnswerFile(path, []).answers == {0: [5, 6], 9: [7]}
    assert path.read_bytes().endswith(b"\n[9, [7]]\n"), "the line that a kill has cut is removed"


def test_a_cut_line_is_removed_without_writing_the_others_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kill or a full disk in the meantime lost all answers."""
    path = tmp_path / "answers.jsonl"
    path.write_text("[0, [5, 6]]\n[1, [7")
    monkeypatch.setattr(Path, "write_text", lambda *_, **__: pytest.fail("the file is written anew"))
    assert answers.AnswerFile(path, []).answers == {0: [5, 6]}


@pytest.mark.parametrize("state", [{}, {"run": {}}, [1], torch.zeros(2)])
def test_a_checkpoint_of_something_else_is_refused(
    state: object, target: LLM, run_options: Any, tmp_path: Path
) -> None:
    options = run_options("medusa", tmp_path, steps=1)
    options.work.mkdir(parents=True)
    torch.save(state, options.work / "checkpoint.pt")
    with pytest.raises(ConfigError, match="another version of this method"):
        train(target, "medusa", options, Report())


@pytest.mark.parametrize("given", [{"seed": 10**30}, {"cache_gb": float("inf")}])
def test_options_without_an_upper_limit_are_taken(
    given: dict[str, Any], target: LLM, run_options: Any, tmp_path: Path
) -> None:
    """The run ended with a traceback of torch after the target's answers."""
    options = run_options("medusa", tmp_path / "out", steps=1, cache=str(tmp_path / "cache"), **given)
    assert train(target, "medusa", options, Report()).finished


def test_a_rate_that_no_optimizer_takes_is_refused(run_options: Any, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="rate must be a number above 0 and at most 1"):
        run_options("medusa", tmp_path, rate=1e38)
