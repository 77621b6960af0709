"""Validation of configuration files: types and ranges of every number that decides about memory.

`read_json` reads a file, a table of `fields.py` says what its keys may hold, and `check` applies the table.
All of it runs before anything is computed or allocated from a file.  Every fault is a `ModelError` that
names the file and the key.
"""

from __future__ import annotations

import json
import math
import reprlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from outrider.core.validate import Kind
from outrider.errors import ModelError

MAX_BYTES = 1 << 26  # of a JSON file: the index of the largest published models takes 10 MB
MAX_DEPTH = 32
UNBOUNDED = {"time_step_limit"}  # state-space models write an infinity here; they are refused by name


@dataclass(frozen=True)
class Section:
    """A nested object with a table of its own.  strict: whether other values than objects are errors."""

    table: Mapping[str, Any]
    strict: bool = True


BlockTable = Mapping[str, Kind | Section]
ANY = "*"  # the key of a table that stands for every key without an entry


def whole(least: int, most: int) -> Kind:
    """An integer of a range."""
    return Kind(f"a whole number from {least:,} to {most:,}", lambda v: type(v) is int and least <= v <= most)


def real(least: float, most: float, above: bool = False) -> Kind:
    """An integer or float of a range; above: `least` itself is excluded."""

    def accepts(value: Any) -> bool:
        return type(value) in (int, float) and least <= value <= most and not (above and value == least)

    return Kind(f"a number {'above' if above else 'of at least'} {least:g} and at most {most:g}", accepts)


def text(most: int) -> Kind:
    """A string of at most so many characters."""
    return Kind(f"a text of at most {most:,} characters", lambda v: isinstance(v, str) and len(v) <= most)


def each(kind: Kind, most: int) -> Kind:
    """A list of at most `most` values of a kind."""

    def accepts(value: Any) -> bool:
        return isinstance(value, (list, tuple)) and len(value) <= most and all(map(kind.accepts, value))

    return Kind(f"a list of at most {most:,}, each {kind.text}", accepts)


def one_or_more(kind: Kind, most: int) -> Kind:
    """A value of a kind, or a list of them."""
    several = each(kind, most)
    return Kind(f"{kind.text}, or a list of such", lambda v: kind.accepts(v) or several.accepts(v))


FLAG = Kind("true or false", lambda v: isinstance(v, bool))


def check(given: Mapping[str, Any], table: BlockTable, where: object) -> None:
    """Raises ModelError for the first key whose value the table does not allow.

    A null is as good as a missing key.
    """
    for key, value in given.items():
        kind = table.get(key, table.get(ANY))
        if kind is None or value is None:
            continue
        at = f"{where}: {key}"
        if isinstance(kind, Kind):
            kind.check(value, at, ModelError)
        elif isinstance(value, Mapping):
            check(value, kind.table, at)
        elif kind.strict:
            raise ModelError(f"{at} must be an object, got {reprlib.repr(value)}.")


def read_json(path: Path, table: BlockTable | None = None) -> dict[str, Any]:
    """The object in a JSON file, checked against a table.

    Raises ModelError for a file that cannot be read, is too large or nested too deeply, holds no object, a
    key twice, or a number that is not finite.
    """
    try:
        if (size := path.stat().st_size) > MAX_BYTES:
            raise ModelError(f"{path} has {size:,} bytes; at most {MAX_BYTES:,} are read.")
        found = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=_object)
        _check_values(found)
    except RecursionError:
        raise ModelError(f"{path} is corrupt: it is nested more than {MAX_DEPTH} levels deep.") from None
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} is corrupt or cannot be read: {error}") from error
    if not isinstance(found, dict):
        raise ModelError(f"{path} is corrupt: it holds no object.")
    if table is not None:
        check(found, table, path)
    return found


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise ValueError(f"the key {twice!r} occurs twice")
    return found


def _check_values(found: Any) -> None:
    """Raises RecursionError or ValueError.

    Walks level by level: recursion itself would end in a RecursionError.
    """
    level: list[tuple[str, Any]] = [("", found)]
    for _ in range(MAX_DEPTH):
        below: list[tuple[str, Any]] = []
        for key, value in level:
            if isinstance(value, float) and not math.isfinite(value) and key not in UNBOUNDED:
                raise ValueError(f"{key} is {value}, which is no finite number")
            below += _items(key, value)
        if not below:
            return
        level = below
    raise RecursionError


def _items(key: str, value: Any) -> Iterable[tuple[str, Any]]:
    if isinstance(value, dict):
        return value.items()
    return ((key, one) for one in value) if isinstance(value, list) else ()
