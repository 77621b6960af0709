"""`outrider generate`: one prompt, with llama.cpp's options and output."""

from __future__ import annotations

import re
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from typer import Option

from outrider.cli.arguments import one_of, readable, undecodable
from outrider.cli.constraint import structured
from outrider.cli.flags import Given, load, shared
from outrider.cli.speculation import AUTO, config_of
from outrider.errors import ConfigError, RequestError

if TYPE_CHECKING:
    from outrider.core.params import SamplingParams
    from outrider.llm import LLM
    from outrider.outputs import RequestOutput
    from outrider.requests import Prompt

ESCAPES = {"n": "\n", "r": "\r", "t": "\t", "'": "'", '"': '"', "\\": "\\"}


@shared
def generate(
    engine: Given,
    speculation: Given,
    sampling: Given,
    constraint: Given,
    given: Annotated[str | None, typer.Argument(metavar="PROMPT", help="The same as --prompt.")] = None,
    prompt: Annotated[str | None, Option("-p", "--prompt", help="The text to continue.")] = None,
    file: Annotated[
        str | None, Option("-f", "--file", help="Read the prompt from a file; - is standard input.")
    ] = None,
    escape: Annotated[
        bool, Option("-e", "--escape", help=r"Interpret \n, \t, \xHH … in the prompt.")
    ] = False,
    no_display_prompt: Annotated[
        bool, Option("--no-display-prompt", help="Do not print the prompt.")
    ] = False,
    plot_choices: Annotated[
        Path | None, Option(help="Draw what was chosen over time into a file (PNG, SVG).")
    ] = None,
    no_perf: Annotated[bool, Option("--no-perf", help="Do not print timings.")] = False,
) -> None:
    """Continue a text.  The text is streamed to standard output, timings go to standard error.

    Example:  outrider generate -m builtin -md builtin-draft --draft 3 -p "The future of AI is" -n 64 -s 1
    """
    from outrider.bench.figures import figures
    from outrider.bench.plot import check_plot, choices
    from outrider.core.params import SamplingParams

    text = read_prompt(one_of("prompt", given, prompt), file, escape)
    if plot_choices is not None:
        check_plot(plot_choices)
    params = SamplingParams(**sampling, **structured(constraint))
    began = time.perf_counter()
    llm = load(engine, config_of(speculation, AUTO))
    loaded = time.perf_counter()
    if plot_choices is not None and "history" not in llm.engine.report():
        raise ConfigError("--plot-choices draws what an adaptive controller chose: take --method auto.")
    llm.engine.reset()
    last, interrupted = print_answer(llm, text, params, "" if no_display_prompt else text)
    if not no_perf and last is not None:
        total = time.perf_counter() - began
        typer.echo(f"\n{figures(llm.engine, last, loaded - began, total)}", err=True)
    if plot_choices is not None:
        choices(llm.engine.report()["history"], llm.engine.options.model, plot_choices)
    if interrupted:
        raise typer.Exit(130)


def read_prompt(prompt: str | None, file: str | None, escape: bool) -> str:
    """The prompt, as text or from a file.  Raises RequestError for both, none, or an unreadable file."""
    if (prompt is None) == (file is None):
        raise RequestError("give the prompt either as TEXT, with -p TEXT or with -f FILE.")
    if file is not None:
        where = "standard input" if file == "-" else f"the prompt file {file!r}"
        try:
            prompt = sys.stdin.read() if file == "-" else Path(file).read_text("utf-8")
        except UnicodeDecodeError as error:
            raise RequestError(undecodable(where, error)) from error
        except OSError as error:
            raise RequestError(f"{where} cannot be read: {error}") from error
        prompt = readable(prompt.removesuffix("\n"), where)
    assert prompt is not None
    prompt = readable(prompt, "the prompt")
    return unescaped(prompt) if escape else prompt


def unescaped(text: str) -> str:
    r"""`text` with \n, \r, \t, \', \", \\ and \xHH read as in C; any other backslash is literal."""

    def read(found: re.Match[str]) -> str:
        sign, code = found.group(1), found.group(2)
        return chr(int(code, 16)) if code else ESCAPES[sign]

    return re.sub(r"\\(x([0-9a-fA-F]{2})|[nrt'\"\\])", read, text)


@contextmanager
def interruptible() -> Iterator[Callable[[], bool]]:
    """Yield a function that returns whether Ctrl-C was pressed, to be called between steps.

    A second Ctrl-C interrupts.
    """
    pressed: list[bool] = []

    def press(*_: object) -> None:
        if pressed:
            raise KeyboardInterrupt
        pressed.append(True)

    before = signal.signal(signal.SIGINT, press)
    try:
        yield lambda: bool(pressed)
    finally:
        signal.signal(signal.SIGINT, before)


def print_answer(
    llm: LLM, prompt: Prompt, params: SamplingParams, shown: str = ""
) -> tuple[RequestOutput | None, bool]:
    """Print `shown`, then stream the answer.  Returns the last output, and whether Ctrl-C ended it."""
    last: RequestOutput | None = None
    done = 0
    with interruptible() as interrupted:
        try:
            for last in llm.stream(prompt, params):
                if last.error is not None:
                    raise last.error
                text = last.outputs[0].text
                print(shown + text[done:], end="", flush=True)
                shown, done = "", len(text)
                if interrupted():
                    break
        except KeyboardInterrupt:
            pass
        finally:
            if last is not None and last.error is None:
                print(flush=True)
        return last, interrupted()
