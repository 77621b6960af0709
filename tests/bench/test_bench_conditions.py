"""What is reported beside figures."""

from __future__ import annotations

import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from outrider.bench import conditions as module
from outrider.bench.conditions import conditions


def test_the_command_names_no_folder_of_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    given = ["/x/structured.py", "--json", "/x/y/a.json", "--out=/x/b", "--model", "org/name", "-n", "1"]
    monkeypatch.setattr(sys, "argv", given)
    assert conditions()["command"] == "structured.py --json a.json --out=b --model org/name -n 1"


def test_an_installed_copy_does_not_report_the_commit_of_the_repository_around_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = ["-c", "user.name=A", "-c", "user.email=a@example.com"]
    git = partial(subprocess.run, cwd=tmp_path, check=True)
    copy = tmp_path / "conditions.py"
    copy.touch()
    git(["git", "init", "-q"])
    git(["git", *name, "commit", "-q", "--allow-empty", "-m", "Begin"])
    monkeypatch.setattr(module, "__file__", str(copy))
    assert conditions()["commit"] is None
    git(["git", "add", copy.name])
    assert conditions()["commit"]


@pytest.mark.parametrize(("feature", "has"), [("avx512_bf16", True), ("bf16", True), ("avx512f", False)])
def test_bfloat16_in_hardware_on_x86_64_and_arm64(
    feature: str, has: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("outrider.bench.conditions.processor", lambda: frozenset((feature,)))
    assert conditions()["bf16 in hardware"] is has
