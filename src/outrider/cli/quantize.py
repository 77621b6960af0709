"""`outrider quantize`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console


def quantize(
    source: Annotated[str, typer.Argument(help="Folder, hub id, builtin or builtin-draft.")],
    folder: Annotated[Path, typer.Argument(help="The folder to write; new or empty.")],
    bits: Annotated[
        int,
        typer.Option(
            "--bits", "-b", help="8 or 4; 16 or 32: bfloat16 or float32 of a checkpoint in few bits."
        ),
    ] = 8,
    revision: Annotated[str | None, typer.Option(help="Of a hub id.")] = None,
) -> None:
    """Write a checkpoint in few bits, as compressed-tensors (pack-quantized, weights only), or back in plain numbers.

    The numbers are those that --quantization makes while loading, but the file is half or a quarter of the size.
    """
    from outrider.models.export import write

    size = write(source, folder.expanduser(), bits, revision)
    Console().print(f"{folder}: {size:,} bytes of weights in {bits} bits", soft_wrap=True)
