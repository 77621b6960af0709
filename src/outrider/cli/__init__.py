"""The command line: thin, everything it does can be done from Python.

One file a command; `flags.py` has what they share.
"""

from __future__ import annotations

import io
import logging
import os
import re
import sys
from itertools import pairwise
from typing import Annotated, Any, NoReturn

import typer
from typer import Option

from outrider.cli import datastore, online, tune
from outrider.cli.bench import bench
from outrider.cli.chat import chat
from outrider.cli.demo import demo
from outrider.cli.estimate import estimate
from outrider.cli.export import export
from outrider.cli.flags import CONTEXT
from outrider.cli.generate import generate
from outrider.cli.llama_cpp import translated
from outrider.cli.models import models
from outrider.cli.quantize import quantize
from outrider.cli.run_batch import run_batch
from outrider.cli.serve import serve
from outrider.cli.train import train
from outrider.cli.verify import verify
from outrider.errors import OutriderError, is_full, write_fault
from outrider.version import VERSION

# Some versions of typer contain a copy of click; others use click itself.
UsageError: type[Exception] = typer.BadParameter.__mro__[1]

app = typer.Typer(
    no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, context_settings=CONTEXT
)


def print_version(asked: bool) -> None:
    if asked:
        typer.echo(VERSION)
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, Option("--version", "-V", help="Print the version.", callback=print_version, is_eager=True)
    ] = False,
) -> None:
    """Lossless speculative decoding: a cheap drafter proposes tokens, the model verifies many of them at
    once.

    Try  [bold]outrider demo[/], or  [bold]outrider chat -m builtin -md builtin-draft[/].
    """


for command in (generate, chat, bench, estimate, verify, models, quantize, train, export, demo):
    app.command()(command)
for with_options in (serve, run_batch):
    app.command(
        add_help_option=False, context_settings={"allow_extra_args": True, "ignore_unknown_options": True}
    )(with_options)
app.add_typer(datastore.app, name="datastore")
app.add_typer(tune.app, name="tune")
app.add_typer(online.app, name="online")


@app.command()
def version() -> None:
    """Print the version."""
    typer.echo(VERSION)


def main(arguments: list[str] | None = None) -> None:
    """Exit status: 0; 1 if a check failed; 2 for a usage error, with one line on standard error; 130
    for Ctrl-C.
    """
    prepare_streams()
    logging.basicConfig(format="%(levelname)s: %(message)s", level=logging.WARNING)
    given = sys.argv[1:] if arguments is None else arguments
    # INFO: reports the compilation of the kernels, which takes seconds
    logging.getLogger("outrider").setLevel(logging.INFO)
    if not given or {"-h", "--help"} & {*given}:
        from outrider.cli.help import wrap  # it imports rich

        wrap(app)
    try:
        status = app(translated(given), prog_name="outrider", standalone_mode=False)
        sys.stdout.flush()
    except OutriderError as error:
        fail(str(error), error)
    except UsageError as error:
        usage(error, given)
    except typer.Abort:
        raise SystemExit(1) from None
    except BrokenPipeError:  # `outrider … | head`
        drop_output()
        raise SystemExit(1) from None
    except OSError as error:  # a folder that cannot be written, a full disk, a port in use
        if is_full(error) and error.filename is None:  # every other file has its name in the message
            drop_output()
            fail(f"standard output cannot be written: {write_fault(error)}", error)
        fail(str(error), error)
    raise SystemExit(status if isinstance(status, int) else 0)


def prepare_streams() -> None:
    """Open standard streams that are closed, and print "?" for a character that an encoding lacks."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115  for good
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


def drop_output() -> None:
    """Discard what is not printed yet: it would fail again at the end of the process."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def usage(error: Exception, given: list[str]) -> NoReturn:
    """Report a usage error; without any argument print the help."""
    context, message = getattr(error, "ctx", None), error.format_message()  # type: ignore[attr-defined]
    if type(error).__name__ == "NoArgsIsHelpError":
        typer.echo(message, err=True)
        raise SystemExit(2) from error
    path = context.command_path if context is not None else "outrider"
    names = getattr(getattr(error, "param", None), "opts", ())
    wrong = next(
        (after for word, after in pairwise(given) if word in names and repr(after) not in message), None
    )
    got = "" if wrong is None else f", got {wrong!r}"
    if word := misread(given, message, context):
        message, got = f"No such option: {word}", ""
    fail(f"{' '.join(message.split()).rstrip('.')}{got}. See `{path} --help`.", error)


def misread(given: list[str], message: str, context: Any) -> str | None:
    """A word such as llama.cpp's -cnv that was read as -c nv, if the error is due to that."""
    if context is None:
        return None
    options = [name for parameter in context.command.params for name in parameter.opts]
    words = (word for word in given if re.fullmatch("-[a-z]{2,}", word) and word not in options)
    return next((word for word in words if word[:2] in message or "extra argument" in message), None)


def fail(text: str, error: BaseException) -> NoReturn:
    typer.secho("error: ", fg="red", bold=True, err=True, nl=False)
    typer.echo(text, err=True)
    raise SystemExit(2) from error
