"""`outrider quantize`: write a checkpoint in few bits."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console


def quantize(
    source: Annotated[str, typer.Argument(help="Folder, hub id, builtin or builtin-draft.")],
    folder: Annotated[Path, typer.Argument(help="Output folder; new or empty.")],
    bits: Annotated[
        int,
        typer.Option("--bits", "-b", help="8 or 4; 16 or 32 dequantise to bfloat16 or float32."),
    ] = 8,
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit on the hub.")] = None,
) -> None:
    """Quantise a checkpoint to compressed-tensors (pack-quantized, weights only), or dequantise one.

    The weights are those of --quantization, but the files have half or a quarter of the size.
    """
    from outrider.models.export import write

    size = write(source, folder.expanduser(), bits, revision)
    Console().print(f"{folder}: {size:,} bytes of weights in {bits} bits", soft_wrap=True)
