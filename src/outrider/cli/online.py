"""`outrider online`: weights that drafters have learned from traffic."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(no_args_is_help=True, help="Show or delete what a drafter has learned from traffic.")
Folder = Annotated[Path, typer.Argument(metavar="PATH", help="The path of speculative_config's online.")]


@app.command()
def show(path: Folder) -> None:
    """Print what was learned: texts, steps, acceptance, size."""
    from outrider.online import store

    typer.echo(json.dumps({**_state(path), "bytes": store.usage(path.expanduser())}, indent=1))


@app.command()
def delete(path: Folder) -> None:
    """Remove the learned weights: learning begins with the published ones again."""
    from outrider.online import store

    if not store.ours(path.expanduser()):  # a lock alone is left by a process that has not saved any
        raise _nothing(path)
    typer.echo(f"{path}: removed {store.delete(path.expanduser()):,} bytes")


def _state(path: Path) -> dict[str, object]:
    from outrider.online import store

    if (state := store.read(path.expanduser())) is None:
        raise _nothing(path)
    return state


def _nothing(path: Path) -> Exception:
    from outrider.errors import ConfigError

    return ConfigError(f"there are no learned weights in {str(path)!r}.")
