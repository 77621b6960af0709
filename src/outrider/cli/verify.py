"""`outrider verify`."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated

import typer
from typer import Option

from outrider.cli.bench import LOG, opened
from outrider.cli.flags import MAX_TOKENS, OUT, SEED, Given, config_of, load, shared
from outrider.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import Console

    from outrider.bench.questions import Question
    from outrider.certify.certify import Certificate, Effort
    from outrider.certify.passages import Passages
    from outrider.llm import LLM

CONTEXT = 2048  # what a test needs; two engines must fit into the memory


@shared
def verify(
    engine: Given,
    speculation: Given,
    asked: Given,
    minutes: Annotated[
        float, Option("--minutes", min=0, help="Time for the tests; more of it sees smaller differences.")
    ] = 2.0,
    batch_size: Annotated[int, Option("-b", "--batch-size", min=2, help="Requests at once, in company.")] = 8,
    max_tokens: Annotated[int, Option(*MAX_TOKENS, min=1, help="New tokens of the longest texts.")] = 64,
    samples: Annotated[
        int, Option("--samples", min=0, help="Texts of each prompt, at least, where laws are tested.")
    ] = 0,
    seed: Annotated[int, Option(*SEED, min=0, help="Of prompts and texts.")] = 0,
    expect_lossy: Annotated[
        bool, Option("--expect-lossy", help="For rules that are not lossless: measure, and do not fail.")
    ] = False,
    out: Annotated[str | None, Option(*OUT, "--json", help=LOG)] = None,
) -> None:
    """Prove on your own model that speculation loses nothing: same tokens, same laws, no leaks.

    Greedy and seeded texts are compared token for token with those of plain decoding, alone and in company; rules that only
    promise the law are tested by chi-square.  The status is 0 if nothing was found, otherwise 1.

    Example:  outrider verify -m builtin --speculative-config '{"model": "builtin-draft", "verification": "rejection"}'
    """
    from rich.console import Console

    from outrider.bench.questions import read
    from outrider.certify.certificate import figures, panel
    from outrider.certify.certify import Effort
    from outrider.certify.passages import Passages
    from outrider.checkpoints.hub import Checkpoint
    from outrider.config import SpeculativeOptions

    config = config_of(speculation)
    if config is None:
        raise ConfigError("say what to verify: --speculative-config JSON, --method NAME or -md MODEL.")
    if SpeculativeOptions.of(config).rule.lossless and expect_lossy:
        raise ConfigError("--expect-lossy is for rules that are not lossless, and this one is: leave it out.")
    questions = read(asked["file"], raw=asked["raw"]) if "file" in asked else None
    sink = opened(out)
    engine.setdefault(
        "max_model_len", min(CONTEXT, Checkpoint.open(engine["model"], engine.get("revision")).spec.unscaled)
    )
    llm = load(engine, max_num_seqs=batch_size)
    fast = llm.variant(config)
    tokens = max(1, min(max_tokens, llm.engine.max_len // 2))
    prompts, left_out = first_prompts(llm, questions, tokens, seed, asked["raw"])
    console = Console(stderr=out == "-")
    passages = Passages(prompts, llm.engine.max_len - tokens, questions is None, seed)
    made = run(llm, fast, passages, Effort(minutes, tokens, samples, seed), expect_lossy, console)
    console.print(panel(llm, config, made, left_out))
    if sink:
        settings = {"minutes": minutes, "batch size": batch_size, "max tokens": max_tokens, "seed": seed,
                    "raw": asked["raw"], "prompts": str(asked["file"]) if questions else None}  # fmt: skip
        print(json.dumps(figures(llm, config, made, settings), default=repr), file=sink, flush=True)
    if not made.passed:
        raise typer.Exit(1)


def first_prompts(
    llm: LLM, questions: Sequence[Question] | None, tokens: int, seed: int, raw: bool
) -> tuple[list[list[int]], int]:
    """Token ids of the questions, or of our own prompts, and how many did not fit into the context."""
    from outrider.bench.questions import prompts_of
    from outrider.certify.passages import beginnings
    from outrider.core.params import SamplingParams

    if questions is None:
        return beginnings(llm, seed, raw), 0
    found, left_out = prompts_of(llm, questions, SamplingParams(max_tokens=tokens))
    return [prompt["prompt_token_ids"] for _, prompt in found], left_out


def run(
    llm: LLM, fast: LLM, passages: Passages, effort: Effort, expect_lossy: bool, console: Console
) -> Certificate:
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    from outrider.certify.certify import certify

    columns = (TextColumn("{task.description:32}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("Verifying", total=60 * effort.minutes)

        def tick(what: str) -> None:
            bar.update(task, completed=bar.tasks[0].elapsed, description=f"Verifying: {what}")

        return certify(llm, fast, passages, effort, expect_lossy, tick)
