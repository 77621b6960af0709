"""`outrider tune MODEL`: the best method and parameters for a model, its prompts and this machine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from typer import Option

from outrider.cli.arguments import Drafts, Target, Temperature, bar_over, check_file, named, with_prompts
from outrider.cli.flags import MAX_TOKENS, OUT, SEED, Given, shared
from outrider.errors import saving


@shared
def search(
    engine: Given,
    asked: Given,
    target: Target = None,
    drafts: Drafts = None,
    minutes: Annotated[float, Option("--minutes", min=0.05, help="Time for the search.")] = 5.0,
    out: Annotated[Path, Option(*OUT, help="Output file, a speculative_config.")] = Path("tuned.json"),
    tokens: Annotated[int, Option(*MAX_TOKENS, min=2, help="Maximum new tokens per prompt.")] = 64,
    temperature: Temperature = 0.0,
    seed: Annotated[int, Option(*SEED, min=0, help="Seed of every request.")] = 7,
) -> None:
    """Search methods and parameters on real runs, and write the best setting as a speculative_config.

    Ctrl-C ends the search early: the best setting so far is written, and the exit status is 130.
    """
    from outrider.core.params import SamplingParams
    from outrider.tune.layerskip import import_optuna
    from outrider.tune.report import show_ranking
    from outrider.tune.search import Search, spaces

    import_optuna()  # before anything slow
    check_file(out, "setting")
    asked_for, console = spaces(drafts or []), Console()
    params = SamplingParams(temperature=temperature, max_tokens=tokens, seed=seed)
    llm, prompts = with_prompts(named(engine, target), asked, params, max_num_seqs=1)
    with bar_over(minutes, "Searching", console) as tick:
        outcome = Search(llm, prompts, params, minutes).run(asked_for, tick)
    with saving("setting", out):
        out.expanduser().write_text(json.dumps(outcome.config, indent=1) + "\n", encoding="utf-8")
    show_ranking(outcome, out, llm.engine.exact, console)
    if outcome.changed:
        raise typer.Exit(1)
    if outcome.interrupted:
        raise typer.Exit(130)
