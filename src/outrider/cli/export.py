"""`outrider export`: a trained head in another published layout."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from typer import Option

from outrider.cli.flags import OUT


def export(
    head: Annotated[str, typer.Argument(metavar="HEAD", help="Folder, hub id or builtin-NAME.")],
    layout: Annotated[str, Option("--format", help="Layout to write: reference, vllm, sglang …")],
    out: Annotated[Path, Option(*OUT, help="Folder to write; new or empty.")],
    method: Annotated[str | None, Option("--method", help="Default: by the tensors of the head.")] = None,
    revision: Annotated[str | None, Option("--revision", help="Branch, tag or commit on the hub.")] = None,
    quantization: Annotated[
        str | None, Option("--quantization-draft", help="int8 or int4; default: bfloat16.")
    ] = None,
) -> None:
    """Write a trained head in another layout that its method can be read in."""
    from outrider.train.export import export as write

    name = write(head, layout, out.expanduser(), method, revision, quantization)
    typer.echo(f"{out}: a head for {name!r} in the layout {layout!r}")
