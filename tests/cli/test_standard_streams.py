"""Standard streams that are closed, or whose encoding lacks a character."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys

import pytest
from covering import parametrized

OUTRIDER = [sys.executable, "-m", "outrider"]
GENERATE = ["generate", "-p", "5 × 你", "-n", "4", "--temp", "0", "--no-perf"]


@parametrized(
    {"encoding": ["ascii", "latin-1", "cp1252"], "command": ["models", "generate"]},
    [("ascii", "generate"), ("latin-1", "models"), ("cp1252", "generate")],
)
def test_characters_that_the_terminal_lacks_are_replaced(encoding: str, command: str) -> None:
    env = {**os.environ, "PYTHONIOENCODING": encoding, "PYTHONUTF8": "0"}
    words = GENERATE if command == "generate" else ["models", "builtin"]
    result = subprocess.run([*OUTRIDER, *words], env=env, capture_output=True)
    assert result.returncode == 0, result.stderr
    text = result.stdout.decode(encoding)
    assert ("×" in text) == (encoding != "ascii")
    assert ("?" in text) == (command == "generate" or encoding == "ascii")


@pytest.mark.parametrize(
    "closed", [pytest.param("<&-", marks=pytest.mark.full), ">&-", "2>&-", "<&- >&- 2>&-"]
)
def test_closed_streams_are_empty_ones(closed: str) -> None:
    command = f"{shlex.join(OUTRIDER)} chat -n 4 {closed}"
    result = subprocess.run(["sh", "-c", command], capture_output=True, text=True, stdin=subprocess.DEVNULL)
    assert (result.returncode, result.stdout) == (0, ""), result.stderr
    assert "Traceback" not in result.stderr
