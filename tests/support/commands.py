"""Output of commands, for the tests of the command line."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass
class Result:
    status: int
    out: str
    err: str


Run = Callable[..., Result]  # run("generate", "-p", "x", stdin="…")
