"""`outrider verify`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from typer import Option

from outrider.bench.certificate import figures, panel
from outrider.bench.certify import Certificate, Effort, certify
from outrider.bench.passages import Passages, beginnings
from outrider.bench.questions import prompts_of, read
from outrider.cli.bench import opened
from outrider.cli.flags import Given, config_of, load, shared
from outrider.config import SpeculativeOptions
from outrider.errors import ConfigError
from outrider.llm import LLM
from outrider.models.hub import Checkpoint
from outrider.sampling.params import SamplingParams

CONTEXT = 2048  # what a test needs; two engines must fit into the memory


@shared
def verify(
    engine: Given,
    speculation: Given,
    file: Annotated[
        Path | None,
        Option(
            "--prompts",
            help="Text with a prompt a line, or .jsonl as bench takes it; else our own and the model's words.",
        ),
    ] = None,
    minutes: Annotated[
        float, Option("--minutes", min=0, help="Time for the tests; more of it sees smaller differences.")
    ] = 2.0,
    batch_size: Annotated[int, Option("-b", "--batch-size", min=2, help="Requests at once, in company.")] = 8,
    max_tokens: Annotated[
        int, Option("-n", "--max-tokens", min=1, help="New tokens of the longest texts.")
    ] = 64,
    samples: Annotated[
        int, Option("--samples", min=0, help="Texts of each prompt, at least, where laws are tested.")
    ] = 0,
    seed: Annotated[int, Option("-s", "--seed", min=0, help="Of prompts and texts.")] = 0,
    expect_lossy: Annotated[
        bool, Option("--expect-lossy", help="For rules that are not lossless: measure, and do not fail.")
    ] = False,
    out: Annotated[
        str | None, Option("--json", help="Append everything as one line to this file; - prints it.")
    ] = None,
) -> None:
    """Prove on your own model that speculation loses nothing: same tokens, same laws, no leaks.

    Greedy and seeded texts are compared token for token with those of plain decoding, alone and in company; rules that only
    promise the law are tested by chi-square.  The status is 0 if nothing was found, otherwise 1.

    Example:  outrider verify -m builtin --speculative-config '{"model": "builtin-draft", "verification": "rejection"}'
    """
    config = config_of(speculation)
    if config is None:
        raise ConfigError("say what to verify: --speculative-config JSON, --method NAME or -md MODEL.")
    if SpeculativeOptions.of(config).rule.lossless and expect_lossy:
        raise ConfigError("--expect-lossy is for rules that are not lossless, and this one is: leave it out.")
    asked = read(file) if file else None
    sink = opened(out)
    engine.setdefault(
        "max_model_len", min(CONTEXT, Checkpoint.open(engine["model"], engine.get("revision")).spec.unscaled)
    )
    llm = load(engine, max_num_seqs=batch_size)
    fast = llm.variant(config)
    tokens = max(1, min(max_tokens, llm.engine.max_len // 2))
    prompts, left_out = beginnings(llm, seed), 0
    if asked is not None:
        found, left_out = prompts_of(llm, asked, SamplingParams(max_tokens=tokens))
        prompts = [prompt["prompt_token_ids"] for _, prompt in found]
    console = Console(stderr=out == "-")
    passages = Passages(prompts, llm.engine.max_len - tokens, asked is None, seed)
    made = run(llm, fast, passages, Effort(minutes, tokens, samples, seed), expect_lossy, console)
    console.print(panel(llm, config, made, left_out))
    if sink:
        settings = {
            "minutes": minutes,
            "batch size": batch_size,
            "max tokens": tokens,
            "seed": seed,
            "prompts": str(file) if file else None,
        }
        print(json.dumps(figures(llm, config, made, settings), default=repr), file=sink, flush=True)
    if not made.passed:
        raise typer.Exit(1)


def run(
    llm: LLM, fast: LLM, passages: Passages, effort: Effort, expect_lossy: bool, console: Console
) -> Certificate:
    columns = (TextColumn("{task.description:32}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("Verifying", total=60 * effort.minutes)

        def tick(what: str) -> None:
            bar.update(task, completed=bar.tasks[0].elapsed, description=f"Verifying: {what}")

        return certify(llm, fast, passages, effort, expect_lossy, tick)
