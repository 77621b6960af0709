"""The command line: thin, everything it does can be done from Python."""

from __future__ import annotations

import typer
from rich.console import Console

from outrider.errors import OutriderError

app = typer.Typer(help="Speculative decoding that changes no token.", no_args_is_help=True, add_completion=False)


@app.callback()
def root() -> None:
    """Outrider makes a language model answer sooner without changing one token."""


@app.command()
def demo(
    tokens: int = typer.Option(64, min=1, max=512, help="New tokens a prompt, at most."),
    repeats: int = typer.Option(1, min=1, max=20, help="Best of so many turns, two runs each."),
) -> None:
    """Decode our prompts with the built-in model, plainly and with every method, and compare."""
    from outrider.bench.demo import demo as run

    if not run(tokens, repeats, Console()):
        raise typer.Exit(1)


@app.command()
def version() -> None:
    """Print the version."""
    from outrider.version import VERSION

    typer.echo(VERSION)


def main() -> None:
    try:
        app()
    except OutriderError as error:
        Console(stderr=True).print(f"[bold red]error:[/] {error}", highlight=False)
        raise SystemExit(2) from error
