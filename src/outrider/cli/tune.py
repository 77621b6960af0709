"""`outrider tune …`: fit a method to a model and a machine."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Option
from typer.core import TyperGroup

from outrider.cli.arguments import Draft, Target, named
from outrider.cli.flags import LEVELS, MAX_TOKENS, OUT, SEED, TEMPERATURE, Given, load, shared
from outrider.cli.tune_control import control
from outrider.cli.tune_search import search
from outrider.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import Console

    from outrider.bench.measure import Measured
    from outrider.tune.layerskip import Trial, Tuner

SEARCH = "search"  # the command of `outrider tune MODEL`


class Group(TyperGroup):
    """`tune MODEL …` is `tune search MODEL …`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if args and args[0] not in (*self.commands, "-h", "--help"):
            args = [SEARCH, *args]
        return super().parse_args(ctx, args)


app = typer.Typer(cls=Group, no_args_is_help=True, help="Fit speculation to a model and a machine.")
app.command(SEARCH)(search)
app.command()(control)


@app.callback()
def root() -> None:
    """Make every method a subcommand."""


@app.command()
@shared
def layerskip(
    engine: Given,
    asked: Given,
    target: Annotated[
        str | None, typer.Argument(metavar="MODEL", help="The same as -m.", show_default=False)
    ] = None,
    minutes: Annotated[float, Option("--minutes", min=0.01, help="Time for the search.")] = 5.0,
    out: Annotated[Path, Option(*OUT, help="Output file.")] = Path("layers.json"),
    depth: Annotated[int, Option(*LEVELS, min=1, max=25, help="Maximum draft tokens per step.")] = 6,
    tokens: Annotated[int, Option(*MAX_TOKENS, min=2, help="Maximum new tokens per prompt.")] = 48,
    seed: Annotated[int, Option(*SEED, help="Seed of the optimiser.")] = 0,
) -> None:
    """Find the sublayers of a model to skip while drafting, by Bayesian optimisation of its decoding speed.

    Times of a step and a draft token are measured first; each trial then measures acceptance.
    """
    from rich.console import Console

    from outrider.bench.measure import measure
    from outrider.bench.questions import prompts_for, read
    from outrider.core.params import SamplingParams
    from outrider.tune.layerskip import Tuner, compared, gain, import_optuna, save

    import_optuna()  # before anything slow
    engine = named(engine, target)
    if not out.expanduser().parent.is_dir():
        raise ConfigError(f"there is no folder {str(out.parent)!r} for the file of the set.")
    questions = read(asked["file"], raw=asked["raw"]) if "file" in asked else None
    llm, console = load(engine), Console()
    params = SamplingParams(temperature=0, max_tokens=tokens)
    prompts, _ = prompts_for(llm, questions, params, asked["raw"])
    tuner = Tuner(llm, prompts, depth, tokens, seed)
    best = searched(tuner, minutes, console)
    results = measure(llm, compared(best, tuner.layers), prompts, params, repeats=3)
    save(best, tuner.layers, engine["model"], len(tuner.trials), gain(results), out.expanduser())
    told(tuner, best, results, f"{len(prompts)} prompts, greedy", out, console)


def searched(tuner: Tuner, minutes: float, console: Console) -> Trial:
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description:40}"), BarColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task, began = bar.add_task("Measuring what a step costs", total=60 * minutes), bar.get_time()

        def tick(tried: int, best: float) -> None:
            bar.update(
                task,
                completed=bar.get_time() - began,
                description=f"{tried} sets tried, best {best:.0f} tokens/s",
            )

        return tuner.run(minutes, tick)


def told(
    tuner: Tuner, best: Trial, results: Sequence[Measured], title: str, out: Path, console: Console
) -> None:
    """Print the best set, its speed and whether it is faster than plain decoding."""
    from outrider.bench.report import table
    from outrider.tune.layerskip import gain

    costs, measured = tuner.costs, gain(results)
    console.print(table(title, results), "")
    console.print(
        f"{len(tuner.trials)} sets tried.  A step takes {1e3 * costs.step:.2f} ms, {1e3 * costs.row:.2f} ms "
        "more a draft token; "
        f"drafting one with all layers {1e3 * costs.full:.2f} ms, less {1e3 * costs.attention:.3f} for "
        "every attention and "
        f"{1e3 * costs.mlp:.3f} for every MLP that is skipped."
    )
    console.print(
        f"Skipped: attention {list(best.skip.attention)}, MLP {list(best.skip.mlp)}; {best.depth} draft "
        "tokens a step."
    )
    if measured <= 1:
        console.print(
            f"This set is slower than plain decoding: {measured:.2f}×. {out} was written and says so; using "
            "it does not pay here. "
            "More --minutes or other --prompts may find a better one.",
            style="bold red",
        )
    console.print(
        f'{out}: use it with --speculative-config \'{{"method": "layerskip", "layers": "{out}"}}\'',
        soft_wrap=True,
        markup=False,
    )


@app.command()
@shared
def disco(
    engine: Given,
    asked: Given,
    target: Target = None,
    second: Annotated[str | None, typer.Argument(metavar="DRAFT", help="The same as -md.")] = None,
    draft: Draft = None,
    out: Annotated[Path, Option(*OUT, help="Output file (.safetensors).")] = Path("disco.safetensors"),
    tokens: Annotated[int, Option(*MAX_TOKENS, min=1, help="New tokens per prompt.")] = 64,
    temperature: Annotated[
        float, Option(*TEMPERATURE, help="0 is greedy; use the temperature of the later runs.")
    ] = 0.0,
    levels: Annotated[int, Option(*LEVELS, min=1, max=64, help="Draft tokens per step.")] = 8,
    seed: Annotated[int, Option(*SEED, help="Seed of the sampled texts and of the fit.")] = 0,
) -> None:
    """Fit the classifier that stops a draft model early (DISCO)."""
    from rich.console import Console
    from rich.progress import Progress

    from outrider.bench.questions import prompts_for, read
    from outrider.core.params import SamplingParams
    from outrider.tune.disco import HOLD_OUT, fit, record

    if draft and second:
        raise ConfigError(
            f"the draft model is given twice, as {second!r} and as -md {draft!r}: leave one out."
        )
    draft = draft or second
    if draft is None:
        raise ConfigError("no draft model is given: -md MODEL.")
    questions = read(asked["file"], raw=asked["raw"]) if "file" in asked else None
    llm = load(named(engine, target))
    params = SamplingParams(temperature=temperature, max_tokens=tokens, seed=seed)
    prompts, _ = prompts_for(llm, questions, params, asked["raw"])
    screen = Console(stderr=True)
    with Progress(console=screen, transient=True, disable=not screen.is_terminal) as bar:
        task = bar.add_task("Drafting", total=len(prompts))
        recorded = record(llm, draft, prompts, params, levels, lambda: bar.advance(task))
    found = fit(recorded, seed)
    found.classifier.save(str(out))
    console = Console()
    console.print(f"{out}: fitted to {found.fitted:,} draft tokens.")
    if found.held_out:
        console.print(
            f"Of {found.held_out:,} others it judged {found.right / found.held_out:.0%} rightly, "
            f"the more frequent answer alone {found.majority / found.held_out:.0%}."
        )
    else:
        console.print(f"It was not tested on others: that takes {HOLD_OUT} prompts.")
    console.print(
        f'Use it: --model-draft {draft} --speculative-config \'{{"stop_classifier": "{out}"}}\'',
        soft_wrap=True,
        markup=False,
    )
