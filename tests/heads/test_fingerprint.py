"""A head that Outrider trained names its target, and says so where it is used for another one."""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path

import pytest

from outrider import LLM
from outrider.checkpoints.heads import builtin
from outrider.checkpoints.hub import GROWN, Checkpoint
from outrider.heads.base import FINGERPRINT
from outrider.models import export


def test_every_built_in_head_has_the_fingerprint_of_its_target() -> None:
    expected = Checkpoint.open("builtin").fingerprint
    assert expected is not None and Checkpoint.open(GROWN).fingerprint == expected
    for name, folder in builtin().items():
        assert json.loads((folder / "config.json").read_text())[FINGERPRINT] == expected, name


def test_a_fingerprint_survives_another_precision_and_tells_targets_apart(tmp_path: Path, tiny: Path) -> None:
    export.write("builtin", tmp_path / "plain", 16)
    plain = Checkpoint.open(str(tmp_path / "plain")).fingerprint
    assert plain == Checkpoint.open("builtin").fingerprint != Checkpoint.open(str(tiny)).fingerprint


def test_a_head_of_another_target_warns(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "outrider"):
        LLM("builtin", speculative_config={"model": "builtin-eagle"}, max_model_len=64)
    assert not caplog.records
    folder = tmp_path / "eagle"
    shutil.copytree(builtin()["builtin-eagle"], folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, FINGERPRINT: "0" * 16}))
    with caplog.at_level(logging.WARNING, "outrider"):
        LLM("builtin", speculative_config={"model": str(folder)}, max_model_len=64)
    assert "another target than builtin" in caplog.text
