"""`outrider tune MODEL`: the best method and parameters for a model, its prompts and this machine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from typer import Option

from outrider.cli.flags import MAX_TOKENS, MODEL_DRAFT, OUT, SEED, TEMPERATURE, Given, load, named, shared
from outrider.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import Console

    from outrider.tune.search import Outcome


@shared
def search(
    engine: Given,
    asked: Given,
    target: Annotated[str | None, typer.Argument(metavar="[MODEL]", help="The same as -m.")] = None,
    drafts: Annotated[
        list[str] | None, Option(*MODEL_DRAFT, help="Draft model or head; may be given several times.")
    ] = None,
    minutes: Annotated[float, Option("--minutes", min=0.05, help="Time for the search.")] = 5.0,
    out: Annotated[Path, Option(*OUT, help="Output file, a speculative_config.")] = Path("tuned.json"),
    tokens: Annotated[int, Option(*MAX_TOKENS, min=2, help="Maximum new tokens per prompt.")] = 64,
    temperature: Annotated[
        float, Option(*TEMPERATURE, help="0 is greedy; use that of the later runs.")
    ] = 0.0,
    seed: Annotated[int, Option(*SEED, min=0, help="Seed of every request.")] = 7,
) -> None:
    """Search methods and parameters on real runs, and write the best setting as a speculative_config."""
    from rich.console import Console
    from rich.progress import Progress

    from outrider.bench.questions import prompts_for, read
    from outrider.core.params import SamplingParams
    from outrider.tune.search import Search, candidates

    if not out.expanduser().parent.is_dir():
        raise ConfigError(f"there is no folder {str(out.parent)!r} for the setting.")
    settings = candidates(drafts or [])
    questions = read(asked["file"], raw=asked["raw"]) if "file" in asked else None
    llm, console = load(named(engine, target), max_num_seqs=1), Console()
    params = SamplingParams(temperature=temperature, max_tokens=tokens, seed=seed)
    prompts, _ = prompts_for(llm, questions, params, asked["raw"])
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("Searching", total=60 * minutes)

        def tick(what: str) -> None:
            bar.update(task, completed=bar.tasks[0].elapsed or 0, description=what)

        outcome = Search(llm, prompts, params, minutes).run(settings, tick)
    try:
        out.expanduser().write_text(json.dumps(outcome.config, indent=1) + "\n")
    except OSError as error:
        raise ConfigError(f"the setting cannot be written to {str(out)!r}: {error}") from error
    show(outcome, out, console)
    if any(one.changed for one in (*outcome.ranking, *outcome.dropped)):
        raise typer.Exit(1)


def show(outcome: Outcome, out: Path, console: Console) -> None:
    """The ranking with confidence intervals, and what was written."""
    from rich.table import Table

    from outrider.tune.search import LEVEL, OFF

    made = Table(show_edge=False)
    for name in ("setting", "speed-up", f"{LEVEL} % interval", "runs", "same\ntok."):
        made.add_column(name, justify="left" if name == "setting" else "right")
    for one in (*outcome.ranking, *outcome.dropped):
        low, high = one.interval
        known = f"{low:.2f} … {high:.2f}" if len(one.pairs) > 2 else "–"
        mark = "[bold red]✗[/]" if one.changed else "✓" if one in outcome.ranking else "–"
        made.add_row(one.label, f"{one.gain:.2f}×", known, str(len(one.pairs)), mark)
    console.print(made)
    for label, reason in outcome.refused.items():
        console.print(f"Left out: {label}: {reason}", style="dim", soft_wrap=True)
    if outcome.untried:
        console.print(f"Not tried for lack of time: {', '.join(outcome.untried)}. Give more --minutes.")
    best = outcome.ranking[0]
    if outcome.config == OFF:
        console.print(
            f"Nothing was faster than plain decoding: {out} switches speculation off.", style="bold"
        )
    elif best.interval[0] <= 1:
        console.print(
            f"{best.label} is not shown to be faster than plain decoding: its interval includes 1. "
            "Give more --minutes.",
            style="bold",
        )
    console.print(f"{out}: use it with --speculative-config @{out}", soft_wrap=True, markup=False)
