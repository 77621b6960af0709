"""`outrider demo`."""

from __future__ import annotations

from typing import Annotated

import typer
from typer import Option

from outrider.cli.flags import MAX_TOKENS


def demo(
    tokens: Annotated[
        int, Option(*MAX_TOKENS, "--tokens", min=1, max=512, help="New tokens a prompt, at most.")
    ] = 64,
    repeats: Annotated[int, Option(min=1, max=20, help="Best of so many turns, two runs each.")] = 1,
) -> None:
    """Decode our prompts with the built-in model, plainly and with every method, and compare."""
    from rich.console import Console

    from outrider.bench.demo import demo as run

    if not run(tokens, repeats, Console()):
        raise typer.Exit(1)
