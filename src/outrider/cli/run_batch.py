"""`outrider run-batch`: answers to the requests in a file, in the form of OpenAI's batches."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import typer
from rich.console import Console

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
    asked = list(requests_in(text_of(requests, "the file of requests").split("\n")))
    out = Path(answers).expanduser()
    kept = prepared(out, resume)
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
    from outrider.serve.batch import run_batch
    from outrider.serve.state import Server

    logging.getLogger("outrider.serve").setLevel(logging.WARNING)  # no line for each request
    console = Console(stderr=True)
    with console.status("Loading the model"):
        llm = service.load()
    server = Server(service.options, service.engine["model"])
    try:
        server.started(llm)
        at_once, began = WAITING * llm.llm.engine.options.max_num_seqs, time.monotonic()
        with open(out, "a", encoding="utf-8") as sink, counted("requests", len(requests), console) as advance:

            def write(answer: dict[str, Any]) -> None:
                with writing(out):
                    print(json.dumps(answer, ensure_ascii=False), file=sink, flush=True)
                advance(str(answer["custom_id"])[:32])

            tally = asyncio.run(run_batch(server, requests, at_once, write))
        return tally, time.monotonic() - began
    finally:
        llm.shutdown()


def prepared(out: Path, resume: bool) -> set[str]:
    """Make the file of answers, or with `resume` keep what it has.  Returns the custom_ids that are kept.

    Raises ConfigError for a file that has answers, without `resume`, and one that cannot be written.
    """
    from outrider.core.validate import text_of
    from outrider.serve.batch import answered_in
    from outrider.train.base import replace_text

    check_file(out, "answers")
    if not out.exists() or not out.stat().st_size:
        return set()
    if not resume:
        raise ConfigError(
            f"{str(out)!r} has answers: --resume keeps them and asks for the others, or name another file."
        )
    kept = dict(answered_in(text_of(out, "the file of answers").split("\n")))
    replace_text(out, "".join(f"{line}\n" for line in kept.values()))
    return {*kept}
