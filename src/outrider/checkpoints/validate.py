"""Validation of configuration files: types and ranges of every number that determines memory use.

`read_json` reads a file.  A table of `fields.py` lists the values that its keys may have, and `check` applies
the table.  Both run before anything is computed or allocated.  Every fault is a `ModelError` that names the
file and the key.
"""

from __future__ import annotations

import json
import math
import reprlib
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from outrider.core.validate import Kind
from outrider.errors import ModelError

MAX_BYTES = 1 << 26  # size of a JSON file: the index of the largest published models has 10 MB
MAX_DEPTH = 32
UNBOUNDED = {"time_step_limit"}  # infinite in state-space models, which are rejected by name


@dataclass(frozen=True)
class Section:
    """A nested object with its own table.  strict: values other than objects are errors."""

    table: Mapping[str, Any]
    strict: bool = True


Table = Mapping[str, Kind | Section]
ANY = "*"  # matches every key without an entry of its own


def real(least: float, most: float, above: bool = False) -> Kind:
    """An integer or float from `least` to `most`.  above: `least` itself is excluded."""

    def accepts(value: Any) -> bool:
        return type(value) in (int, float) and least <= value <= most and not (above and value == least)

    return Kind(f"a number {'above' if above else 'of at least'} {least:g} and at most {most:g}", accepts)


def text(most: int) -> Kind:
    """A string of at most `most` characters."""
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


def check(given: Mapping[str, Any], table: Table, where: object) -> None:
    """Raise ModelError for the first key whose value the table does not allow.

    null is the same as a missing key.
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


def read_json(path: Path, table: Table | None = None) -> dict[str, Any]:
    """Read the object in a JSON file and check it against a table.

    Raises ModelError for a file that cannot be read, is too large, is nested too deeply, or is no object.
    Also for duplicate keys and numbers that are not finite.
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
    """A JSON object.  Raises ValueError for a key that occurs twice."""
    found = dict(pairs)
    if len(found) < len(pairs):
        (twice, _), *_ = Counter(key for key, _ in pairs).most_common(1)
        raise ValueError(f"the key {twice!r} occurs twice")
    return found


def _check_values(found: Any) -> None:
    """Raise RecursionError for deep nesting, ValueError for numbers that are not finite.

    Iterates level by level, since a recursive walk could itself exceed the recursion limit.
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
