"""`outrider demo`."""

from __future__ import annotations

import typer
from rich.console import Console


def demo(
    tokens: int = typer.Option(64, min=1, max=512, help="New tokens a prompt, at most."),
    repeats: int = typer.Option(1, min=1, max=20, help="Best of so many turns, two runs each."),
) -> None:
    """Decode our prompts with the built-in model, plainly and with every method, and compare."""
    from outrider.bench.demo import demo as run

    if not run(tokens, repeats, Console()):
        raise typer.Exit(1)
