"""Common parts of commands beside flags: positional arguments, prompts, a bar over time, the last line."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from typer import Option

from outrider.cli.flags import BUILTIN, MODEL_DRAFT, TEMPERATURE, Given, load
from outrider.errors import ConfigError, RequestError

if TYPE_CHECKING:
    from outrider.bench.measure import Prompts
    from outrider.core.params import SamplingParams
    from outrider.llm import LLM

Target = Annotated[str | None, typer.Argument(metavar="MODEL", help="The same as -m.")]
Draft = Annotated[str | None, Option(*MODEL_DRAFT, help="The model that drafts.")]
Drafts = Annotated[
    list[str] | None, Option(*MODEL_DRAFT, help="Draft model or head; may be given several times.")
]
LATER = "0 is greedy; use that of the later runs."
Temperature = Annotated[float, Option(*TEMPERATURE, help=LATER)]


def one_of(what: str, first: Any, second: Any) -> Any:
    """The value that was given, by position or by flag.  Raises ConfigError for both."""
    if first is not None and second is not None:
        raise ConfigError(
            f"the {what} is given twice, as {str(first)!r} and as {str(second)!r}: leave one out."
        )
    return second if first is None else first


def named(engine: Given, model: str | None) -> Given:
    """`engine` with the model that was given by its place or by -m, or the built-in one.

    Raises ConfigError for two of them.
    """
    given = engine.get("model")
    chosen = given if model == given else one_of("model", model, given)
    return {**engine, "model": BUILTIN if chosen is None else chosen}


def readable(text: str, where: str) -> str:
    """The text.  Raises RequestError for bytes that are not UTF-8, which Python reads as lone surrogates."""
    for character in text:
        if "\udc80" <= character <= "\udcff":
            raise RequestError(f"{where} is not UTF-8 text: byte {ord(character) - 0xDC00:#x}.")
    return text


def undecodable(where: str, error: UnicodeDecodeError) -> str:
    """The message for a text that Python could not decode."""
    return f"{where} is not UTF-8 text: byte {error.object[error.start]:#x}."


def check_folder(out: Path, what: str) -> None:
    """Raise ConfigError unless the folder of a result exists: before anything slow."""
    if not out.expanduser().parent.is_dir():
        raise ConfigError(f"there is no folder {str(out.parent)!r} for the {what}.")


def check_file(out: Path, what: str) -> None:
    """Raise ConfigError unless a file of this name can be made: before anything slow."""
    check_folder(out, what)
    if out.expanduser().is_dir():
        raise ConfigError(f"{str(out)!r} is a folder: name a file for the {what}.")


def with_prompts(engine: Given, asked: Given, params: SamplingParams, **more: Any) -> tuple[LLM, Prompts]:
    """The model, and the prompts of --prompts, which are read before it is loaded, or our own."""
    from outrider.bench.questions import prompts_for, read

    questions = read(asked["file"], raw=asked["raw"]) if "file" in asked else None
    llm = load(engine, **more)
    return llm, prompts_for(llm, questions, params, asked["raw"])[0]


@contextmanager
def bar_over(minutes: float, what: str, console: Console) -> Iterator[Callable[[str], None]]:
    """A bar over the time of a search.  Yields a function that takes the name of the current work."""
    columns = (TextColumn("{task.description:40}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(what, total=60 * minutes)
        yield lambda now: bar.update(task, completed=bar.tasks[0].elapsed or 0, description=now)


def print_use(out: object, config: Mapping[str, Any], more: str = "") -> None:
    """Print how a file that was written is used.  more: further options."""
    text = f"{out}: use it with {more}--speculative-config '{json.dumps(config)}'"
    Console().print(text, soft_wrap=True, markup=False)
