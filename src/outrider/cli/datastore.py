"""`outrider datastore build`: index a corpus for the method datastore."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import Progress

from outrider.cli.arguments import print_use
from outrider.cli.flags import MODEL, MODEL_HELP, OUT

CORPORA = ".txt, .md, .py, .jsonl (one text or list of ids per line), .npy (ids), or folders of such."

app = typer.Typer(
    no_args_is_help=True,
    help="Corpora for the method datastore, which drafts by looking up what followed the same tokens there.",
)


@app.callback()
def root() -> None:
    """Make `build` a subcommand."""


@app.command()
def build(
    inputs: Annotated[list[str], typer.Argument(help=CORPORA)],
    output: Annotated[str, typer.Option(*OUT, help="Output file.")],
    model: Annotated[
        str, typer.Option(*MODEL, help=f"Model of the tokenizer and vocabulary. {MODEL_HELP}")
    ] = "builtin",
) -> None:
    """Build a suffix array of a corpus."""
    from outrider.checkpoints.hub import Checkpoint
    from outrider.draft.datastore.corpus import build as run

    checkpoint = Checkpoint.open(model)
    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
        tasks = {}

        def tick(what: str, done: int, total: int) -> None:
            if what not in tasks:
                tasks[what] = bar.add_task(what.capitalize(), total=total)
            bar.update(tasks[what], completed=done, total=total)

        run(inputs, output, checkpoint.tokenizer, checkpoint.spec.vocabulary, tick)
    typer.echo(f"{output}: {Path(output).expanduser().stat().st_size:,} bytes")
    print_use(output, {"method": "datastore", "datastore": output})
