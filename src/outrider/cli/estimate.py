"""`outrider estimate`: what a draft model gains, before any speculative run."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from typer import Option

from outrider.cli.flags import (
    LEVELS,
    MAX_TOKENS,
    MODEL_DRAFT,
    OUT,
    SEED,
    TEMPERATURE,
    Given,
    load,
    named,
    shared,
)
from outrider.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import Console

    from outrider.bench.measure import Prompts
    from outrider.core.params import SamplingParams
    from outrider.llm import LLM
    from outrider.tune.estimate import Estimate

BAR = 40  # blocks of the longest bar
CLOSE = 0.1  # a prediction may be off by this


@shared
def estimate(
    engine: Given,
    asked: Given,
    target: Annotated[str | None, typer.Argument(metavar="[MODEL]", help="The same as -m.")] = None,
    draft: Annotated[str | None, Option(*MODEL_DRAFT, help="The model that drafts.")] = None,
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

    from outrider.bench.plot import check_plot, lines
    from outrider.bench.questions import prompts_for, read
    from outrider.core.params import SamplingParams
    from outrider.tune.estimate import estimate as run

    if draft is None:
        raise ConfigError("no draft model is given: -md MODEL.")
    if out is not None:
        check_plot(out)
    questions = read(asked["file"], raw=asked["raw"]) if "file" in asked else None
    llm, console = load(named(engine, target), max_num_seqs=1), Console()
    params = SamplingParams(temperature=temperature, max_tokens=tokens, seed=seed)
    prompts, _ = prompts_for(llm, questions, params, asked["raw"])
    with Console(stderr=True).status("Measuring") as status:
        costs, found = run(
            llm, draft, prompts, params, depth, lambda what: status.update(f"Measuring {what}")
        )
    console.print(
        f"A step takes {1e3 * costs.step:.2f} ms, one with {depth} draft tokens "
        f"{1e3 * (costs.step + costs.verify[depth]):.2f}; drafting {depth} takes "
        f"{1e3 * costs.propose[1, depth]:.2f}."
    )
    show(found, console)
    if out is not None:
        plain = found[0].speed
        curves = {
            name: [plain, *(one.speed for one in found[1:] if one.siblings == siblings)]
            for siblings, name in ((1, "chain"), (2, "2 siblings"), (3, "3 siblings"))
        }
        lines(curves, "draft tokens in depth", "tokens/s", f"{draft}: predicted", out)
        console.print(f"{out}: the picture.", soft_wrap=True)
    best = max(found[1:], key=lambda one: one.speed)
    if check and not checked(llm, draft, best, prompts, params, console):
        raise typer.Exit(1)


def show(found: Sequence[Estimate], console: Console) -> None:
    """A bar for each setting, and the best one."""
    most, best = max(one.speed for one in found), max(found, key=lambda one: one.speed)
    for one in found:
        kind = "chain" if one.siblings == 1 else f"{one.siblings} siblings"
        name = "plain decoding" if one.depth == 0 else f"{kind}, depth {one.depth}"
        mark = "  ◀ best" if one is best else ""
        console.print(
            f"{name:22} {'▇' * round(BAR * one.speed / most):{BAR}} {one.speed:7.1f} tokens/s  "
            f"{one.gain:.2f}×  {one.tokens_per_step:.2f} tokens a step{mark}",
            highlight=False,
            soft_wrap=True,
        )
    if best.depth == 0:
        console.print("Plain decoding is the fastest: this draft does not pay here.")


def checked(
    llm: LLM, draft: str, best: Estimate, prompts: Prompts, params: SamplingParams, console: Console
) -> bool:
    """Measure the best draft and plain decoding in turns.  Whether the predicted speed-up was close."""
    from outrider.bench.measure import PLAIN, measure

    configs = {PLAIN: None, "draft": best.config(draft)}
    plain, measured = measure(llm, configs, prompts, params, repeats=3)
    gain = measured.speed_up(plain)
    off = best.gain / gain - 1
    console.print(
        f"Measured: {measured.speed:.1f} tokens/s, {gain:.2f}×, {measured.total.tokens_per_step:.2f} tokens "
        f"a step; the predicted {best.gain:.2f}× is off by {off:+.1%}.",
        soft_wrap=True,
    )
    return abs(off) <= CLOSE
