"""Arguments by place that several commands have, beside the same thing by flag."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from typer import Option

from outrider.cli.flags import MODEL_DRAFT, Given
from outrider.errors import ConfigError

Target = Annotated[str | None, typer.Argument(metavar="MODEL", help="The same as -m.")]
Draft = Annotated[str | None, Option(*MODEL_DRAFT, help="The model that drafts.")]
Drafts = Annotated[
    list[str] | None, Option(*MODEL_DRAFT, help="Draft model or head; may be given several times.")
]


def one_of(what: str, first: Any, second: Any) -> Any:
    """What was given, by its place or by flag.  Raises ConfigError for both."""
    if first is not None and second is not None:
        raise ConfigError(
            f"the {what} is given twice, as {str(first)!r} and as {str(second)!r}: leave one out."
        )
    return second if first is None else first


def named(engine: Given, model: str | None) -> Given:
    """`engine` with the model that was given by its place instead of by -m.

    Raises ConfigError for two of them.
    """
    if model is None:
        return engine
    by_flag = None if engine["model"] in (model, "builtin") else engine["model"]
    return {**engine, "model": one_of("model", model, by_flag)}
