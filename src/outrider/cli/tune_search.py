"""`outrider tune MODEL`: the best method and parameters for a model, its prompts and this machine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from typer import Option

from outrider.cli.arguments import Drafts, Target, named
from outrider.cli.flags import MAX_TOKENS, OUT, SEED, TEMPERATURE, Given, load, shared
from outrider.errors import ConfigError


@shared
def search(
    engine: Given,
    asked: Given,
    target: Target = None,
    drafts: Drafts = None,
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
    from outrider.tune.report import show_ranking
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
    show_ranking(outcome, out, console)
    if any(one.changed for one in (*outcome.ranking, *outcome.dropped)):
        raise typer.Exit(1)
