"""The command line: thin, everything it does can be done from Python.  One file a command; `flags.py` has what they share."""

from __future__ import annotations

import logging
import os
import sys

import typer
from rich.console import Console
from rich.text import Text

from outrider.cli import datastore, tune
from outrider.cli.bench import bench
from outrider.cli.chat import chat
from outrider.cli.demo import demo
from outrider.cli.generate import generate
from outrider.cli.models import models
from outrider.cli.quantize import quantize
from outrider.cli.verify import verify
from outrider.errors import OutriderError

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={
        "help_option_names": ["-h", "--help"],
        "token_normalize_func": lambda name: name.replace("_", "-"),  # --top_k is --top-k
    },
)


@app.callback()
def root() -> None:
    """Speculative decoding that changes no token: something cheap guesses, the real model checks many guesses at once.

    Try  [bold]outrider demo[/], or  [bold]outrider chat -m builtin -md builtin-draft[/].
    """


for command in (generate, chat, bench, verify, models, quantize, demo):
    app.command()(command)
app.add_typer(datastore.app, name="datastore")
app.add_typer(tune.app, name="tune")


@app.command()
def version() -> None:
    """Print the version."""
    from outrider.version import VERSION

    typer.echo(VERSION)


def main(arguments: list[str] | None = None) -> None:
    """Exit status: 0, 1 where a check failed, 2 for anything wrong with what was asked (one line says what), 130 for Ctrl-C."""
    logging.basicConfig(format="%(levelname)s: %(message)s", level=logging.WARNING)
    try:
        app(arguments, prog_name="outrider")
    except OutriderError as error:
        Console(stderr=True, soft_wrap=True).print(Text.assemble(("error: ", "bold red"), str(error)))
        raise SystemExit(2) from error
    except BrokenPipeError:  # `outrider … | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(1) from None
