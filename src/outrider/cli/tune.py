"""`outrider tune …`: fit a method to a model and a machine."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from typer import Option
from typer.core import TyperGroup

from outrider.cli.arguments import (
    Draft,
    Target,
    Temperature,
    bar_over,
    check_file,
    named,
    one_of,
    print_use,
    with_prompts,
)
from outrider.cli.flags import LEVELS, MAX_TOKENS, OUT, SEED, Given, shared
from outrider.cli.tune_control import control
from outrider.cli.tune_search import search
from outrider.errors import ConfigError

SEARCH = "search"  # the command of `outrider tune MODEL`
HELP = "Fit speculation to a model and a machine.  `outrider tune MODEL` is `outrider tune search MODEL`."


class Group(TyperGroup):
    """`tune MODEL …` is `tune search MODEL …`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if args and args[0] not in (*self.commands, "-h", "--help"):
            _check_model(args[0], self.commands)
            args = [SEARCH, *args]
        return super().parse_args(ctx, args)


def _check_model(name: str, commands: Iterable[str]) -> None:
    """Raise ConfigError for a misspelt command: it would be loaded as a model.

    Names with a slash, and those with more letters than a slip of the fingers adds, are models of the hub.
    """
    near_length = [command for command in commands if abs(len(command) - len(name)) <= 1]
    close = get_close_matches(name, near_length, cutoff=0.8)
    if close and "/" not in name and not Path(name).exists():
        near = " or ".join(f"`outrider tune {command}`" for command in close)
        raise ConfigError(f"there is neither a command nor a model {name!r} for tune: is it {near}?")


app = typer.Typer(cls=Group, no_args_is_help=True, help=HELP)
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
    target: Target = None,
    minutes: Annotated[float, Option("--minutes", min=0.01, help="Time for the search.")] = 5.0,
    out: Annotated[Path, Option(*OUT, help="Output file.")] = Path("layers.json"),
    depth: Annotated[int, Option(*LEVELS, min=1, max=25, help="Maximum draft tokens per step.")] = 6,
    tokens: Annotated[int, Option(*MAX_TOKENS, min=2, help="Maximum new tokens per prompt.")] = 48,
    seed: Annotated[int, Option(*SEED, help="Seed of the optimiser.")] = 0,
) -> None:
    """Find the sublayers of a model to skip while drafting, by Bayesian optimisation of its decoding speed.

    Times of a step and a draft token are measured first; each trial then measures acceptance.
    """
    from outrider.bench.rounds import Rounds, measure
    from outrider.core.params import SamplingParams
    from outrider.tune.layerskip import Tuner, compared, gain, import_optuna, save
    from outrider.tune.report import show_layers

    import_optuna()  # before anything slow
    engine, console = named(engine, target), Console()
    check_file(out, "file of the set")
    params = SamplingParams(temperature=0, max_tokens=tokens)
    llm, prompts = with_prompts(engine, asked, params)
    tuner = Tuner(llm, prompts, depth, tokens, seed)
    with bar_over(minutes, "Measuring what a step costs", console) as tick:
        best = tuner.run(minutes, lambda tried, most: tick(f"{tried} sets tried, best {most:.0f} tokens/s"))
    results = measure(llm, compared(best, tuner.layers), prompts, params, Rounds(3))
    speed_up = gain(results)
    save(best, tuner.layers, engine["model"], len(tuner.trials), speed_up, out.expanduser())
    show_layers(tuner, best, results, speed_up, out, console)
    print_use(out, {"method": "layerskip", "layers": str(out)})


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
    temperature: Temperature = 0.0,
    levels: Annotated[int, Option(*LEVELS, min=1, max=64, help="Draft tokens per step.")] = 8,
    seed: Annotated[int, Option(*SEED, help="Seed of the sampled texts and of the fit.")] = 0,
) -> None:
    """Fit the classifier that stops a draft model early (DISCO)."""
    from outrider.bench.report import counted
    from outrider.core.params import SamplingParams
    from outrider.tune.disco import HOLD_OUT, fit, record

    if (draft := one_of("draft model", second, draft)) is None:
        raise ConfigError("no draft model is given: -md MODEL.")
    check_file(out, "classifier")
    params = SamplingParams(temperature=temperature, max_tokens=tokens, seed=seed)
    llm, prompts = with_prompts(named(engine, target), asked, params)
    with counted("Drafting", len(prompts), Console(stderr=True)) as tick:
        recorded = record(llm, draft, prompts, params, levels, tick)
    found = fit(recorded, seed)
    found.classifier.save(str(out.expanduser()))
    console = Console()
    console.print(f"{out}: fitted to {found.fitted:,} draft tokens.")
    if found.held_out:
        console.print(
            f"Of {found.held_out:,} others it judged {found.right / found.held_out:.0%} rightly, "
            f"the more frequent answer alone {found.majority / found.held_out:.0%}."
        )
    else:
        console.print(f"It was not tested on others: that takes {HOLD_OUT} prompts.")
    print_use(out, {"stop_classifier": str(out)}, f"--model-draft {draft} ")
