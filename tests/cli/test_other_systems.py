"""Nothing that only POSIX has is needed to import Outrider and to generate."""

from __future__ import annotations

import subprocess
import sys

WITHOUT_POSIX = """
import importlib, multiprocessing, os, pkgutil, signal, socket, sys
import fastapi, filelock, httpx, numpy, optuna, rich, safetensors.torch, scipy.stats, torch, typer, uvicorn
from transformers import AttentionInterface
for name in ("fcntl", "grp", "pwd", "resource", "termios", "tty"):
    sys.modules[name] = None
for name in ("fork", "forkpty", "geteuid", "getuid", "getpgid", "killpg", "mkfifo", "register_at_fork",
             "sched_getaffinity", "setsid", "statvfs", "sysconf", "O_NOFOLLOW", "O_NONBLOCK"):
    delattr(os, name)
for name in ("SIGALRM", "SIGHUP", "SIGKILL", "SIGUSR1", "pthread_sigmask"):
    delattr(signal, name)
del socket.AF_UNIX, multiprocessing.context.ForkServerProcess
for name in ("fork", "forkserver"):
    del multiprocessing.context._concrete_contexts[name]
"""
IMPORTS = """
import outrider
for module in pkgutil.walk_packages(outrider.__path__, "outrider."):
    if not module.name.endswith("__main__"):
        try:
            importlib.import_module(module.name)
        except ModuleNotFoundError as error:
            if error.name not in ("ray", "triton"):  # extras
                raise
"""
GENERATES = """
from outrider.backends.cpu import build
build.load = lambda *_: None  # as without a compiler
from outrider.cli import main
try:
    main(["generate", "-m", "builtin", "-p", "The", "-n", "3", "-s", "1", "--temp", "0"])
except SystemExit as error:
    assert not error.code, error.code
assert "multiprocessing.popen_forkserver" not in sys.modules
"""


def run(program: str) -> str:
    done = subprocess.run([sys.executable, "-c", WITHOUT_POSIX + program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_text_is_generated_and_every_module_imported_without_what_only_posix_has() -> None:
    assert run(GENERATES + IMPORTS).startswith("The")
