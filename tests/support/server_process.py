"""Main function of a forked server; apart from `served`, whose imports it does not need."""

from __future__ import annotations

import os
import sys
from pathlib import Path


def serve(options: tuple[str, ...], log: Path, environment: dict[str, str]) -> None:
    """Run `outrider serve` with these options, its output in a file."""
    import torch

    from outrider.cli import main

    file = os.open(log, os.O_WRONLY | os.O_APPEND)
    for stream in (sys.stdout, sys.stderr):
        os.dup2(file, stream.fileno())
    os.environ.update(environment)
    torch.set_num_threads(1)
    main(["serve", *options])
