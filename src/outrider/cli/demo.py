"""`outrider demo`: plain decoding and speculation side by side, then all methods in one table."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console
from typer import Option

from outrider.cli.arguments import Drafts, one_of
from outrider.cli.flags import MAX_TOKENS, MODEL
from outrider.errors import ConfigError


def demo(
    target: Annotated[
        str | None, typer.Argument(metavar="MODEL", help="Your own model; default: the built-in one.")
    ] = None,
    model: Annotated[str | None, Option(*MODEL, help="The same as MODEL.")] = None,
    drafts: Drafts = None,
    small: Annotated[
        bool, Option("--small", help="The built-in model as it is, not at the cost of a larger one.")
    ] = False,
    tokens: Annotated[
        int, Option(*MAX_TOKENS, "--tokens", min=2, max=512, help="Maximum new tokens per prompt.")
    ] = 96,
) -> None:
    """See the same tokens arrive sooner: plain decoding and speculation side by side, then all methods."""
    from outrider.bench.demo import demo as run

    own = one_of("model", target, model)
    if own is None and drafts:
        raise ConfigError(f"-md {drafts[0]} is for a model of your own: give it as MODEL.")
    if own is not None and small:
        raise ConfigError(f"--small is for the built-in model, and {own!r} is given: leave one out.")
    if not run(own, drafts or [], small, tokens, Console()):
        raise typer.Exit(1)
