"""Number of threads: torch's setting, in every Python thread, at most the processors of the container."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from kernel_cases import c_backend, needs_c

from outrider import LLM, SamplingParams
from outrider.backends.cpu import threads

PROGRAM = """
import json, os, sys
import torch
from outrider.backends.select import backend_for
from outrider.backends.cpu import threads
found = []
for quota, asked in json.loads(sys.argv[1]):
    threads.limit.cache_clear()  # as in a new process
    threads.quota = lambda *_: quota
    if asked:
        os.environ["OMP_NUM_THREADS"] = str(asked)
    torch.set_num_threads(asked or 4)
    backend_for(torch.device("cpu"), torch.float32)
    found.append([torch.get_num_threads()])
    torch.set_num_threads(5)
    backend_for(torch.device("cpu"), torch.float32)
    found[-1].append(torch.get_num_threads())
print(json.dumps(found))
"""


def written(folder: Path, **files: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(text + "\n")


@pytest.mark.parametrize(
    ("inner", "outer", "expected"),
    [
        ("250000 100000", "max 100000", 2.5),
        ("max 100000", "max 100000", None),
        ("400000 100000", "150000 100000", 1.5),
        (None, "50000 100000", 0.5),
        ("nonsense", "max", None),
    ],
)
def test_quota_of_version_2(inner: str | None, outer: str, expected: float | None, tmp_path: Path) -> None:
    """The least of the group and those above it; a container sees its own as the root."""
    groups, own = tmp_path / "cgroup", tmp_path / "own"
    own.write_text("0::/a/b\n")
    written(groups / "a", cpu__max=outer)
    written(groups / "a/b", **({} if inner is None else {"cpu__max": inner}))
    assert threads.quota(groups, own) == expected


@pytest.mark.parametrize(("most", "expected"), [("300000", 3.0), ("-1", None)])
@pytest.mark.parametrize("mount", ["cpu,cpuacct", "cpu"])
def test_quota_of_version_1(most: str, expected: float | None, mount: str, tmp_path: Path) -> None:
    groups, own = tmp_path / "cgroup", tmp_path / "own"
    own.write_text("4:memory:/x\n3:cpu,cpuacct:/docker/a:b\n0::/\n")
    place = groups / mount / "docker/a:b"
    written(place, cpu__cfs_quota_us=most, cpu__cfs_period_us="100000")
    assert threads.quota(groups, own) == expected


def test_without_control_groups_there_is_no_quota(tmp_path: Path) -> None:
    assert threads.quota(tmp_path / "none", tmp_path / "none either") is None


def test_threads_are_lowered_once_to_the_quota() -> None:
    """Not what OMP_NUM_THREADS asks for, and not what torch is told afterwards."""
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    cases = json.dumps([(1.5, None), (0.3, None), (64, None), (1, 3)])  # quota, OMP_NUM_THREADS
    result = subprocess.run(
        [sys.executable, "-c", PROGRAM, cases], env=environment, capture_output=True, text=True, check=True
    )
    assert json.loads(result.stdout) == [[2, 5], [1, 5], [4, 5], [3, 5]]


@needs_c
def test_a_step_uses_torchs_number_of_threads(tiny: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    lib, seen = c_backend().lib, []
    monkeypatch.setattr(lib, "set_threads", seen.append)
    llm, before = LLM(str(tiny), max_model_len=64), torch.get_num_threads()
    monkeypatch.setattr(threads, "numbers", {lib: 0})
    for count in (1, 3):
        torch.set_num_threads(count)
        llm.generate({"prompt_token_ids": [1, 2, 3]}, SamplingParams(max_tokens=3))
        seen.append(0)
    torch.set_num_threads(before)
    assert seen == [1, 0, 3, 0]
