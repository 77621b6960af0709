"""`outrider estimate`: what a draft model gains, before any speculative run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from typer import Option

from outrider.cli.arguments import Draft, Target, named, with_prompts
from outrider.cli.flags import LEVELS, MAX_TOKENS, OUT, SEED, TEMPERATURE, Given, shared
from outrider.errors import ConfigError


@shared
def estimate(
    engine: Given,
    asked: Given,
    target: Target = None,
    draft: Draft = None,
    depth: Annotated[int, Option(*LEVELS, min=1, max=32, help="Most draft tokens per step.")] = 8,
    tokens: Annotated[int, Option(*MAX_TOKENS, min=2, help="Maximum new tokens per prompt.")] = 64,
    temperature: Annotated[float, Option(*TEMPERATURE, help="0 is greedy.")] = 0.0,
    seed: Annotated[int, Option(*SEED, min=0, help="Seed of every request.")] = 7,
    out: Annotated[Path | None, Option(*OUT, help="Write the curves as a picture (.png, .svg).")] = None,
    check: Annotated[
        bool,
        Option(
            "--check",
            help="Measure the best draft; exit status 1 if its predicted speed-up is off by over 10 %.",
        ),
    ] = False,
) -> None:
    """Predict the speed-up of a draft model by depth and tree, from costs and one pass over answers."""
    from rich.console import Console

    from outrider.bench.plot import check_plot
    from outrider.core.params import SamplingParams
    from outrider.tune.estimate import estimate as run
    from outrider.tune.report import check_estimate, draw_estimates, show_estimates

    if draft is None:
        raise ConfigError("no draft model is given: -md MODEL.")
    if out is not None:
        check_plot(out)
    params, console = SamplingParams(temperature=temperature, max_tokens=tokens, seed=seed), Console()
    llm, prompts = with_prompts(named(engine, target), asked, params, max_num_seqs=1)
    with Console(stderr=True).status("Measuring") as status:
        costs, found = run(
            llm, draft, prompts, params, depth, lambda what: status.update(f"Measuring {what}")
        )
    show_estimates(costs, found, console)
    if out is not None:
        draw_estimates(found, draft, out)
        console.print(f"{out}: the picture.", soft_wrap=True)
    best = max(found[1:], key=lambda one: one.speed)
    if check and not check_estimate(llm, draft, best, prompts, params, console):
        raise typer.Exit(1)
