"""`outrider demo`: all methods on the built-in model."""

from __future__ import annotations

from typing import Annotated

import typer
from typer import Option

from outrider.cli.flags import MAX_TOKENS


def demo(
    tokens: Annotated[
        int, Option(*MAX_TOKENS, "--tokens", min=1, max=512, help="Maximum new tokens per prompt.")
    ] = 64,
    repeats: Annotated[int, Option(min=1, max=20, help="Rounds of two runs each; the best one counts.")] = 1,
) -> None:
    """Compare plain decoding and every method on the built-in model and prompts."""
    from rich.console import Console

    from outrider.bench.demo import demo as run

    if not run(tokens, repeats, Console()):
        raise typer.Exit(1)
