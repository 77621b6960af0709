"""Output of commands, for the tests of the command line."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from outrider.serve.options import ServerOptions


@dataclass
class Result:
    status: int
    out: str
    err: str


Run = Callable[..., Result]  # run("generate", "-p", "x", stdin="…")
# options of the server and of the engine, and its speculative_config
Started = tuple[ServerOptions, dict[str, Any], dict[str, Any] | None]
