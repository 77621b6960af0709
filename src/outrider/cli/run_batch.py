"""`outrider run-batch`: answers to the requests in a file, in the form of OpenAI's batches."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import mkstemp
from typing import Any, TextIO

import typer
from rich.console import Console
from rich.markup import escape

from outrider.cli.arguments import check_file
from outrider.cli.flag import Flag
from outrider.cli.serve import Command, check, run_with_options
from outrider.errors import ConfigError, writing

MORE = (
    Flag("requests", str, "--input-file -i", "Requests, one a line: custom_id, method, url and body."),
    Flag("answers", str, "--output-file --out -o", "File to write, with an answer a line."),
    Flag(
        "resume",
        bool,
        "--resume",
        "Keep the answers that the output file has, and ask for the others.",
        False,
    ),
)
SERVER = (
    "served_model_name",
    "max_logprobs",
    "lora_modules",
    "chat_template",
    "default_chat_template_kwargs",
    "trust_request_chat_template",
    "tool_call_parser",
    "reasoning_parser",
    "restart_engine",
)
WAITING = 2  # requests in the engine, for each sample of a batch
NO_LIMIT = 1 << 40
BYTE_ORDER_MARK = "\ufeff"


def run_batch(context: typer.Context) -> int:
    """Answer the requests in a file: outrider run-batch MODEL -i FILE -o FILE.  --help lists the options."""
    about = """Answer requests in a file, in the form of OpenAI's batches, without a server.

    Example:  outrider run-batch builtin -i requests.jsonl -o answers.jsonl
    """
    return run_with_options(context, Command("outrider run-batch", about, begin, MORE, SERVER))


def begin(
    options: Any,
    engine: dict[str, Any],
    config: dict[str, Any] | None,
    threads: int | None,
    requests: str | None,
    answers: str | None,
    resume: bool,
) -> None:
    """Check options and files, then load, and answer all requests."""
    check(options, engine, config, threads)
    from outrider.core.validate import text_of
    from outrider.parallel.start import join, placed
    from outrider.serve.batch import requests_in
    from outrider.serve.run import Service

    if placed():
        join()  # one rank answers
    if requests is None or answers is None:
        raise ConfigError("a file of requests and one for their answers are needed: -i FILE -o FILE.")
    out = Path(answers).expanduser()
    if out.is_file() and os.path.exists(given := os.path.expanduser(requests)) and out.samefile(given):
        raise ConfigError(f"{requests!r} and {answers!r} are one file: name another one for the answers.")
    text = text_of(requests, "the file of requests").removeprefix(BYTE_ORDER_MARK)
    asked = list(requests_in(text.split("\n")))
    kept = prepared(out, resume) & {request.custom_id for request in asked}
    left = [request for request in asked if request.custom_id not in kept]
    if not left:
        typer.echo(f"{out}: all {len(asked)} requests have an answer.")
        return
    # requests wait in the engine, for as long as it takes
    limits = {"max_requests": NO_LIMIT, "max_body_bytes": NO_LIMIT, "request_timeout": float(NO_LIMIT)}
    service = Service(replace(options, **limits), engine, config, threads)
    tally, seconds = answer_all(service, left, out)
    counts = (
        (tally.answered, "answered"),
        (len(kept), "kept from before"),
        (tally.refused, "refused"),
        (tally.unread, "that are no requests"),
    )
    parts = ", ".join(f"{count:,} {what}" for count, what in counts if count)
    tokens, rate = tally.output_tokens, tally.output_tokens / max(seconds, 1e-9)
    typer.echo(f"{out}: {parts}; {tokens:,} tokens in {seconds:.1f} s, {rate:,.0f} tokens/s.")


def answer_all(service: Any, requests: Sequence[Any], out: Path) -> tuple[Any, float]:
    """Load a `Service` and answer every `BatchRequest`.  Returns a `Tally` and seconds without loading."""
    from outrider.bench.report import counted
    from outrider.serve.batch import Tally, run_batch
    from outrider.serve.state import Server

    logging.getLogger("outrider.serve").setLevel(logging.WARNING)  # no line for each request
    console = Console(stderr=True)
    with console.status("Loading the model"):
        llm = service.load()
    server, tally, count = Server(service.options, service.engine["model"]), Tally(), 0
    try:
        server.started(llm)
        at_once, began = WAITING * llm.llm.engine.options.max_num_seqs, time.monotonic()
        with appended(out) as sink, counted("requests", len(requests), console) as advance:

            def write(answer: dict[str, Any]) -> None:
                nonlocal count
                with writing(out):
                    print(json.dumps(answer, ensure_ascii=False), file=sink, flush=True)
                tally.add(answer)
                count += 1
                advance(escape(str(answer["custom_id"])[:32]))

            asyncio.run(run_batch(server, requests, at_once, write))
        return tally, time.monotonic() - began
    except KeyboardInterrupt:
        typer.echo(
            f"{out}: {count:,} of {len(requests):,} requests are answered: --resume goes on.", err=True
        )
        raise
    finally:
        llm.shutdown()


@contextmanager
def appended(out: Path) -> Iterator[TextIO]:
    """A file to add lines to.  Half a surrogate pair is escaped, as JSON does it."""
    with writing(out):
        sink = open(out, "a", encoding="utf-8", errors="backslashreplace")  # noqa: SIM115
    try:
        yield sink
    finally:
        with writing(out):  # what a full disk did not take is written again
            sink.close()


def prepared(out: Path, resume: bool) -> set[str]:
    """Make the file of answers, or with `resume` keep what it has.  Returns the custom_ids that are kept.

    Raises ConfigError for a file that has answers, without `resume`, one that has other lines, and one that
    cannot be written.
    """
    from outrider.core.validate import text_of
    from outrider.serve.batch import answered_in

    check_file(out, "answers")
    if not out.exists() or not out.stat().st_size:
        return set()
    if not resume:
        raise ConfigError(
            f"{str(out)!r} has answers: --resume keeps them and asks for the others, or name another file."
        )
    text = text_of(out, "the file of answers")
    try:
        kept = list(answered_in(text.removeprefix(BYTE_ORDER_MARK).split("\n")))
    except ConfigError as error:
        raise ConfigError(f"{str(out)!r} is no file of answers: {error} Name another file.") from error
    left = "".join(f"{line}\n" for _, line in kept)
    if left != text:
        replace_text(out, left)
    return {name for name, _ in kept}


def replace_text(path: Path, text: str) -> None:
    """Write a file beside the old one, with its permissions, then replace that: the target, of a link."""
    path = Path(os.path.realpath(path))
    with writing(path):
        handle, name = mkstemp(suffix=".tmp", prefix=f"{path.name}.", dir=path.parent)
        try:
            with open(handle, "w", encoding="utf-8") as sink:
                sink.write(text)
                sink.flush()
                os.fsync(handle)
            shutil.copymode(path, name)
            os.replace(name, path)
        except BaseException:
            os.unlink(name)
            raise
