"""Conditions of a measurement, reported beside its figures."""

from __future__ import annotations

import os
import platform
import re
import shlex
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch

from outrider.backends.cpu.targets import available, processor
from outrider.version import VERSION


def conditions() -> dict[str, Any]:
    """Versions, machine and command of this process, for JSON."""
    import transformers

    name = Path(sys.argv[0]).name
    listed = Path("/proc/cpuinfo")
    info = listed.read_text(encoding="utf-8") if listed.exists() else ""
    cpu = re.search(r"^model name\s*: (.*)", info, re.MULTILINE)
    made = {
        "date": time.strftime("%Y-%m-%d"),
        "outrider": VERSION,
        "commit": _commit(),
        "cpu": cpu[1] if cpu else platform.processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "bf16 in hardware": not processor().isdisjoint(("avx512_bf16", "bf16")),
        "instruction set": os.environ.get("OUTRIDER_ISA") or available()[-1],
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
        "command": shlex.join(["outrider" if name == "__main__.py" else name, *map(_named, sys.argv[1:])]),
    }
    if torch.cuda.is_available():
        made["gpu"] = torch.cuda.get_device_name()
    return made


def _named(argument: str) -> str:
    """An argument without the folders of an absolute path, which mean nothing on another machine."""
    option, equals, value = argument.rpartition("=")
    return f"{option}{equals}{Path(value).name}" if Path(value).is_absolute() else argument


def _commit() -> str | None:
    """Commit of the source tree that contains this file; None in an installed copy.

    Such a copy may lie inside another repository, whose commit is not ours.
    """
    file = Path(__file__)
    git = partial(subprocess.run, capture_output=True, text=True, cwd=file.parent, check=True)
    try:
        git(["git", "ls-files", "--error-unmatch", file.name])
        return str(git(["git", "describe", "--always", "--dirty"]).stdout).strip()
    except (OSError, subprocess.CalledProcessError):
        return None
