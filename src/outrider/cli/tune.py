"""`outrider tune …`: what a method can learn about a pair of models before it is used."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import Progress

app = typer.Typer(no_args_is_help=True, help="Fit a method to a model, on prompts of yours.")


@app.callback()
def root() -> None:
    """So that every method is a command of its own."""


@app.command()
def disco(
    model: Annotated[str, typer.Argument(help="The target: folder, .gguf file, hub id or built-in name.")],
    draft: Annotated[str, typer.Argument(help="The model that guesses.")],
    prompts: str = typer.Option(..., "--prompts", "-p", help="question.jsonl, or a text file with a prompt a line."),
    out: str = typer.Option(..., "--out", "-o", help="The .safetensors file to write."),
    tokens: int = typer.Option(64, "--n-predict", "-n", min=1, help="New tokens a prompt."),
    temperature: float = typer.Option(0.0, "--temp", help="0 is greedy; fit at the temperature that is used."),
    levels: int = typer.Option(8, "--draft", min=1, max=64, help="Tokens to guess ahead."),
    seed: int = typer.Option(0, "--seed", "-s", help="Of the sampled texts and of the fit."),
) -> None:
    """Fit the network that says when a draft model should stop guessing (DISCO)."""
    from outrider.bench.disco import fit, record
    from outrider.bench.questions import prompts_of, read
    from outrider.cli.flags import load
    from outrider.sampling.params import SamplingParams

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
    console.print(f'Use it: --model-draft {draft} --speculative-config \'{{"stop_classifier": "{out}"}}\'', soft_wrap=True, markup=False)
