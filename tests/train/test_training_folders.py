"""What a training run leaves in its folders."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from outrider import LLM
from outrider.errors import RequestError
from outrider.train.report import Report
from outrider.train.run import PROVENANCE, train


@pytest.mark.parametrize("existing", [False, True])
def test_a_run_without_usable_data_leaves_no_folders(
    existing: bool, target: LLM, run_options: Any, tmp_path: Path
) -> None:
    """`work` with two files of locks was left."""
    data, out, cache = tmp_path / "bad.jsonl", tmp_path / "out", tmp_path / "cache"
    data.write_text("x\n")
    if existing:
        out.mkdir()
    options = run_options("medusa", out, data=(str(data),), cache=str(cache))
    with pytest.raises(RequestError, match="0 usable texts"):
        train(target, "medusa", options, Report())
    assert {*tmp_path.iterdir()} == {data, *([out] if existing else [])}, "a folder of the user stays"
    assert not existing or not [*out.iterdir()]


def test_a_finished_run_has_no_locks_and_keeps_its_times(
    target: LLM, run_options: Any, tmp_path: Path
) -> None:
    """The same command once more wrote zeros over them."""
    options = run_options("medusa", tmp_path, steps=2)
    train(target, "medusa", options, Report())
    assert not [*tmp_path.rglob("*lock")] and (options.work / "checkpoint.pt").exists()
    told = json.loads((tmp_path / PROVENANCE).read_text())
    first = {**told["seconds of the last process"], "loss": 12.5}  # two steps may take nothing, rounded
    (tmp_path / PROVENANCE).write_text(json.dumps({**told, "seconds of the last process": first}))
    train(target, "medusa", options, Report())
    again = json.loads((tmp_path / PROVENANCE).read_text())["seconds of the last process"]
    assert again == first
    train(target, "medusa", run_options("medusa", tmp_path, steps=2, quantization="int8"), Report())
    assert json.loads((tmp_path / PROVENANCE).read_text())["seconds of the last process"] == first
