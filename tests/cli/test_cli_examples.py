"""The examples do what they promise."""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


def test_chat_example_reuses_the_conversations_prefix(capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(EXAMPLES / "chat.py"), run_name="__main__")
    output = capsys.readouterr().out
    assert output.count("> ") == output.count("were cached]") == 3
    assert "[0 of" in output and output.count("[0 of") < 3


def test_the_prompts_of_llama_cpp(tmp_path: Path) -> None:
    """With the very interpreter of the tests as `outrider`."""
    command = tmp_path / "outrider"
    command.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m outrider "$@"\n')
    command.chmod(0o755)
    env = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    done = subprocess.run(
        [EXAMPLES / "speculative.sh", "quicksort"], env=env, capture_output=True, text=True, check=True
    )
    assert (
        done.stdout.startswith("// Quick-sort implementation in C")
        and "sample usage:\n\n#include" in done.stdout
    )
    assert "n_draft   = 3" in done.stderr and "draft:" in done.stderr and "target:" in done.stderr
    assert (
        subprocess.run([EXAMPLES / "speculative.sh", "bubble"], env=env, capture_output=True).returncode == 2
    )
