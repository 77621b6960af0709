"""The threads of the C kernels: each item once, several callers, forks, idle threads (thread_pool.c)."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from outrider.backends.cpu.build import FOLDER

COMPILER = next(filter(None, map(shutil.which, ("cc", "gcc", "clang"))), None)
SANITIZER = "-fsanitize=thread", "-DNO_FORK"  # it knows no threads in a child of a process with threads


@pytest.mark.skipif(COMPILER is None, reason="no C compiler here")
@pytest.mark.parametrize("flags", [(), SANITIZER], ids=["plain", "thread sanitizer"])
def test_threads_share_loops(flags: tuple[str, ...], tmp_path: Path) -> None:
    program, main = tmp_path / "thread_pool", Path(__file__).with_name("thread_pool.c")
    inputs = f"-I{FOLDER}", str(main), str(FOLDER / "threads.c")
    command = [
        str(COMPILER),
        "-O1",
        "-Wno-psabi",
        "-g",
        "-pthread",
        "-std=gnu11",
        *flags,
        *inputs,
        "-o",
        str(program),
        "-lm",
    ]
    built = subprocess.run(command, capture_output=True, text=True)
    if built.returncode and flags:
        pytest.skip("the compiler has no thread sanitizer")
    assert not built.returncode, built.stderr
    result = subprocess.run([program], capture_output=True, text=True, timeout=60)
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")
