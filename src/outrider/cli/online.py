"""`outrider online`: weights that drafters have learned from traffic."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

app = typer.Typer(no_args_is_help=True, help="Show or delete what a drafter has learned from traffic.")
Folder = Annotated[Path, typer.Argument(metavar="PATH", help="The path of speculative_config's online.")]


@app.command()
def show(
    path: Folder,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Print what was seen and learned, and why no further weights were taken into use."""
    from outrider.online import store

    folder = path.expanduser()
    state, report = store.read(folder), store.reported(folder)
    if state is None and report is None:
        raise _nothing(path)
    found = {"bytes": store.usage(folder), "weights": state, "report": report}
    typer.echo(json.dumps(found, indent=1) if as_json else "\n".join(_lines(found)))


@app.command()
def delete(path: Folder) -> None:
    """Remove the learned weights: learning begins with the published ones again."""
    from outrider.online import store

    if not store.ours(path.expanduser()):  # a lock alone is left by a process that has not saved any
        raise _nothing(path)
    typer.echo(f"{path}: removed {store.delete(path.expanduser()):,} bytes")


def _lines(found: dict[str, Any]) -> Iterator[str]:
    weights, report = found["weights"], found["report"]
    if weights is None:
        yield "weights     none: the published ones are in use"
    else:
        about = weights["statistics"]
        yield (
            f"weights     taken into use {about['swaps']} times, taken back {about['returns']} times, "
            f"{found['bytes']:,} bytes"
        )
        yield f"learned     {about['steps']:,} steps, of {about['texts']:,} texts, {about['tokens']:,} tokens"
    if report is None:
        return
    seen, share = report["seen"], report["share"]
    yield f"state       {report['state']} ({report['written']})"
    yield (
        f"seen        {seen['texts']:,} texts, {seen['tokens']:,} tokens; not learned from: "
        f"{seen['short']:,} too short, {seen['apart']:,} with a cache_salt or an adapter"
    )
    yield f"trained     {report['trained']['texts']:,} texts; share {share['used']:.3f} of {share['allowed']}"
    for entry in report["acceptance"]:
        name = f"weights {entry['swaps']}" if entry["swaps"] else "published"
        yield f"accepted    {name}: {entry['accepted']:.3f} of {entry['drafts']:,} drafts (first token)"
    for each in report["judgements"]:
        yield f"judged      after {each['texts']:,} texts: {_judged(each)}"


def _judged(each: dict[str, Any]) -> str:
    if each["loss"] is None or each["needed"] is None:
        return "not better: the loss is not finite"
    what = "better" if each["better"] else "not better"
    return (
        f"{what}: {each['right']:.3f} of the first draft tokens right on {each['held']} held-out texts, "
        f"{each['right_in_use']:.3f} with the weights in use, chance is {each['needed']:.3f}; loss "
        f"{each['loss']:.4f} and {each['loss_in_use']:.4f}"
    )


def _nothing(path: Path) -> Exception:
    from outrider.errors import ConfigError

    return ConfigError(f"there are no learned weights in {str(path)!r}.")
