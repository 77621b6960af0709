"""What the command lines of the benchmarks share: the docstring as their help, and --json for the result."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any


def parser_of(doc: str | None) -> argparse.ArgumentParser:
    """A parser for a script with this docstring."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the result to this file")
    return parser


def settings(given: argparse.Namespace, *left_out: str) -> dict[str, Any]:
    """The arguments by name, for the result: without --json, and without some others."""
    return {name: value for name, value in vars(given).items() if name not in ("json", *left_out)}


def write(path: Path | None, result: dict[str, Any]) -> None:
    """Write a result as JSON, if a file is given."""
    if path is not None:
        path.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
