"""What can go wrong, as one tree.

OutriderError
├── ConfigError      an engine option or a key of speculative_config      (also a ValueError)
├── RequestError     a prompt or a sampling parameter of one request      (also a ValueError)
├── ModelError       a checkpoint that is missing, corrupt or unsupported
├── CapacityError    memory limits that cannot hold what is asked
└── EngineError      a step that failed, for every request that was in it; its cause is what went wrong
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping

NEAR = 0.65  # of difflib: below it, what is suggested has little to do with what was typed
SHORTEST = 3  # letters of a name that say which one is meant


class OutriderError(Exception):
    """Base class: catching it catches everything that Outrider raises on purpose."""


class ConfigError(OutriderError, ValueError):
    """An option that does not exist, or a value that it cannot take."""


class RequestError(OutriderError, ValueError):
    """A request that cannot be served as it stands."""


class ModelError(OutriderError):
    """A checkpoint that cannot be loaded or run."""


class CapacityError(OutriderError):
    """Something does not fit into the memory that the engine was given."""


class EngineError(OutriderError):
    """A step of the engine failed, and this request ended with it.  Later requests are served."""


def unknown(
    kind: str, name: object, valid: Iterable[str], where: str = "", elsewhere: Mapping[str, str] | None = None
) -> str:
    """The sentence that refuses `name`, with the nearest valid one and the whole list.

    where: what has no such name, as in "speculative_config of method 'ngram'".  elsewhere: for names of other programs, what to do here.
    """
    valid = sorted(valid)
    cure = (
        f" {elsewhere[name]}"
        if elsewhere and isinstance(name, str) and name in elsewhere
        else nearest(name, valid)
    )
    return f"unknown {kind} {name!r}{f' in {where}' if where else ''}.{cure} Valid: {', '.join(valid)}."


def shortened(value: object, most: int = 200) -> str:
    """repr of a value, for an error that names it: of a length that can be read, whatever the value is."""
    try:
        text = repr(value)
    except Exception:  # of a whole number with more digits than Python prints, for instance
        return f"<{type(value).__name__} that cannot be shown>"
    return text if len(text) <= most else f"{text[:most]}…"


def nearest(name: object, valid: Iterable[str]) -> str:
    """The question for what was meant, after a blank; "" where nothing is near: neither a few letters apart nor a part of one."""
    valid = list(valid)
    near = difflib.get_close_matches(str(name), valid, n=1, cutoff=NEAR)
    near = near or [
        full
        for full in valid
        if len(str(name)) >= SHORTEST and (full.startswith(str(name)) or full.endswith(f"_{name}"))
    ]
    return f" Did you mean {near[0]!r}?" if near else ""


def first_line(error: Exception) -> str:
    """The first line of an error's message; a line that ends with a colon is joined with the next one."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    return " ".join(lines[:2]) if lines[0].endswith(":") else lines[0]
