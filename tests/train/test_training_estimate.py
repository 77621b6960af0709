"""The estimate of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from outrider import LLM
from outrider.errors import ConfigError, RequestError
from outrider.train.estimate import estimate
from outrider.train.report import Report
from outrider.train.run import train


@pytest.mark.parametrize("quantization", [None, "int8", "int4"])
def test_the_estimated_size_is_that_of_the_file(
    quantization: str | None, target: LLM, run_options: Any, tmp_path: Path
) -> None:
    given = run_options("eagle", tmp_path / "head", steps=1, quantization=quantization)
    found = estimate(target, "eagle", given, Report())
    assert not (tmp_path / "head").exists()
    train(target, "eagle", given, Report())
    size = (tmp_path / "head" / "model.safetensors").stat().st_size
    assert 0.9 * size < found.head <= size


def test_mistakes_in_options_are_found_before_answers(
    target: LLM, run_options: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("outrider.train.data.read", lambda *_: pytest.fail("the data is read"))
    for wrong in ({"format": "nothing"}, {"init": "nowhere"}):
        with pytest.raises(ConfigError, match=r"layout|init"):
            estimate(target, "eagle", run_options("eagle", tmp_path, **wrong), Report())


def test_a_target_without_answers_is_reported(target: LLM, run_options: Any, tmp_path: Path) -> None:
    data = tmp_path / "short.jsonl"
    data.write_text('{"prompt": "a"}\n{"prompt": "b"}\n')
    given = run_options("medusa", tmp_path / "out", data=(str(data),), answer_tokens=1)
    with pytest.raises(RequestError, match="none of the first 2 answers has 4 tokens"):
        estimate(target, "medusa", given, Report())
