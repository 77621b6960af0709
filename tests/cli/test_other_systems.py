"""Nothing that only POSIX has is needed to import Outrider and to generate."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import os, sys
import filelock, numpy, rich, safetensors.torch, torch, typer
for name in ("fcntl", "grp", "pwd", "resource", "termios", "tty"):
    sys.modules[name] = None
for name in ("fork", "forkpty", "geteuid", "getuid", "getpgid", "killpg", "mkfifo", "register_at_fork",
             "sched_getaffinity", "setsid", "statvfs", "sysconf", "O_NOFOLLOW", "O_NONBLOCK"):
    delattr(os, name)
from outrider.backends.cpu import build
build.load = lambda *_: None  # as on Windows, which has no C kernels
from outrider.cli import main
from outrider.online import store
from outrider.parallel import start
from outrider.train import run
try:
    main(["generate", "-m", "builtin", "-p", "The", "-n", "3", "-s", "1", "--temp", "0"])
except SystemExit as error:
    assert not error.code, error.code
assert "multiprocessing.popen_forkserver" not in sys.modules
"""


def test_text_is_generated_without_what_only_posix_has() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("The")
