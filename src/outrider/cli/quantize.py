"""`outrider quantize`: a copy of a checkpoint in other bits."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from typer import Option

from outrider.cli.flags import MODEL, OUT


def quantize(
    model: Annotated[str, Option(*MODEL, help="Folder or hub id; the built-in ones are in 8 bits already.")],
    out: Annotated[Path, Option(*OUT, help="Folder to write; new or empty.")],
    bits: Annotated[int, Option("--bits", help="8 or 4; 16 or 32 turn a quantized checkpoint back.")] = 8,
    revision: Annotated[str | None, Option("--revision", help="Branch, tag or commit on the hub.")] = None,
    trust: Annotated[
        bool, Option("--trust-remote-code", help="Run the code that the checkpoint brings.")
    ] = False,
) -> None:
    """Write a checkpoint in 4 or 8 bits as compressed-tensors (pack-quantized), or back in 16 or 32 bits.

    The numbers are those of --quantization while loading; the file is half or a quarter of the size.
    """
    from rich.console import Console

    from outrider.models.export import write

    with Console(stderr=True).status(f"Writing {bits} bits"):
        size = write(model, out.expanduser(), bits, revision, trust)
    typer.echo(f"{out}: {size:,} bytes of weights in {bits} bits")
