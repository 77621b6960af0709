"""The end of the server's process."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from outrider.testing import tiny_checkpoint

SERVING = """
import atexit, gc, sys
from outrider.cli import main
atexit.register(lambda: print("frozen:", gc.get_freeze_count()))
main(["serve", sys.argv[1], "--port", "0"])
"""


def test_no_object_is_frozen_when_extension_modules_count_theirs(tmp_path: Path) -> None:
    """Triton's prints those that the collector does not visit."""
    command = [sys.executable, "-c", SERVING, tiny_checkpoint(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr is not None and process.stdout is not None
            assert any("is served at" in line for line in process.stderr)
            process.terminate()
            assert process.stdout.read() == "frozen: 0\n"
        finally:
            process.kill()
