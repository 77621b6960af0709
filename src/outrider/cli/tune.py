"""`outrider tune …`: fits a method to a model and a machine before it is used."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from outrider.bench.disco import fit, record
from outrider.bench.measure import Prompts, measure
from outrider.bench.prompts import PROMPTS, rendered
from outrider.bench.questions import prompts_of, read
from outrider.bench.report import table
from outrider.bench.tune import Tuner, compared, save
from outrider.cli.flags import Given, load, shared
from outrider.errors import ConfigError
from outrider.sampling.params import SamplingParams

app = typer.Typer(no_args_is_help=True, help="Fit a method to a model and a machine.")


@app.callback()
def root() -> None:
    """So that every method is a command of its own."""


@app.command()
@shared
def layerskip(
    form: Given,
    model: Annotated[str, typer.Argument(help="Folder, .gguf file, hub id, or builtin.")] = "builtin",
    prompts: Annotated[
        Path | None,
        typer.Option("--prompts", help="question.jsonl, or text with one prompt a line; without it our own."),
    ] = None,
    minutes: Annotated[float, typer.Option("--minutes", min=0.01, help="Time for trying sets.")] = 5.0,
    out: Annotated[Path, typer.Option("--out", "-o", help="The file to write.")] = Path("layers.json"),
    depth: Annotated[
        int, typer.Option("--draft", "--draft-max", min=1, max=25, help="Tokens to guess ahead, at most.")
    ] = 6,
    tokens: Annotated[
        int, typer.Option("-n", "--max-tokens", min=2, help="New tokens a prompt, at most.")
    ] = 48,
    seed: Annotated[int, typer.Option("-s", "--seed", help="Of the optimiser.")] = 0,
) -> None:
    """Find the sublayers of a model to skip while guessing, by Bayesian optimisation of its decoding speed.

    Trials count what the model accepts; what a step and a guess cost on this machine is measured at the beginning.
    """
    if not out.expanduser().parent.is_dir():
        raise ConfigError(f"there is no folder {str(out.parent)!r} for the file of the set.")
    questions = read(prompts, None) if prompts else None
    llm, console = load(form, model=model), Console()
    asked: Prompts = [(p.kind, rendered(p, llm.tokenizer)) for p in PROMPTS] if questions is None else []
    params = SamplingParams(temperature=0, max_tokens=tokens)
    if questions is not None:
        asked, _ = prompts_of(llm, questions, params, False)
    tuner = Tuner(llm, asked, depth, tokens, seed)
    columns = (TextColumn("{task.description:40}"), BarColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task, began = bar.add_task("Measuring what a step costs", total=60 * minutes), bar.get_time()

        def tick(tried: int, best: float) -> None:
            bar.update(
                task,
                completed=bar.get_time() - began,
                description=f"{tried} sets tried, best {best:.0f} tokens/s",
            )

        best = tuner.run(minutes, tick)
    save(best, tuner.layers, model, len(tuner.trials), out.expanduser())
    console.print(
        table(
            f"{len(asked)} prompts, greedy",
            measure(llm, compared(best, tuner.layers), asked, params, repeats=2),
        ),
        "",
    )
    costs = tuner.costs
    console.print(
        f"{len(tuner.trials)} sets tried.  A step takes {1e3 * costs.step:.2f} ms, {1e3 * costs.row:.2f} ms more a guess; a guess with all "
        f"layers {1e3 * costs.whole:.2f} ms, less {1e3 * costs.attention:.3f} for every attention and {1e3 * costs.mlp:.3f} for every MLP "
        "that is skipped."
    )
    console.print(
        f"Skipped: attention {list(best.skip.attention)}, MLP {list(best.skip.mlp)}; {best.depth} guesses a step."
    )
    console.print(
        f'{out}: use it with --speculative-config \'{{"method": "layerskip", "layers": "{out}"}}\'',
        soft_wrap=True,
        markup=False,
    )


@app.command()
def disco(
    model: Annotated[str, typer.Argument(help="The target: folder, .gguf file, hub id or built-in name.")],
    draft: Annotated[str, typer.Argument(help="The model that guesses.")],
    prompts: str = typer.Option(
        ..., "--prompts", "-p", help="question.jsonl, or a text file with a prompt a line."
    ),
    out: str = typer.Option(..., "--out", "-o", help="The .safetensors file to write."),
    tokens: int = typer.Option(64, "--n-predict", "-n", min=1, help="New tokens a prompt."),
    temperature: float = typer.Option(
        0.0, "--temp", help="0 is greedy; fit at the temperature that is used."
    ),
    levels: int = typer.Option(8, "--draft", min=1, max=64, help="Tokens to guess ahead."),
    seed: int = typer.Option(0, "--seed", "-s", help="Of the sampled texts and of the fit."),
) -> None:
    """Fit the network that says when a draft model should stop guessing (DISCO)."""
    llm = load({"model": model})
    params = SamplingParams(temperature=temperature, max_tokens=tokens, seed=seed)
    asked, _ = prompts_of(llm, read(Path(prompts)), params)
    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("Guessing", total=len(asked))
        recorded = record(llm, draft, asked, params, levels, lambda: bar.advance(task))
    found = fit(recorded, seed)
    found.classifier.save(out)
    console = Console()
    console.print(f"{out}: fitted to {found.seen:,} guesses.")
    if found.held_out:
        console.print(
            f"Of {found.held_out:,} others it judged {found.right / found.held_out:.0%} rightly, "
            f"the more frequent answer alone {found.most / found.held_out:.0%}."
        )
    console.print(
        f'Use it: --model-draft {draft} --speculative-config \'{{"stop_classifier": "{out}"}}\'',
        soft_wrap=True,
        markup=False,
    )
