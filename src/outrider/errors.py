"""Exception hierarchy and helpers for error messages.

OutriderError
├── ConfigError      an engine option or a key of speculative_config      (also a ValueError)
├── RequestError     a prompt or a sampling parameter of one request      (also a ValueError)
│   └── ContextError a prompt that leaves no room in the context
├── ModelError       a checkpoint that is missing, corrupt or unsupported
├── CapacityError    memory limits that are too small
└── EngineError      a failed step, for every request in it; __cause__ is the original error
    └── RankError    a lost rank: the model must be loaded again
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from errno import EDQUOT, ENOSPC
from pathlib import Path

NEAR = 0.65  # difflib cutoff of a suggestion
SHORTEST = 3  # fewest letters that are matched as a prefix or suffix of a name


class OutriderError(Exception):
    """Base class of all exceptions that Outrider raises deliberately.

    param: name of the option, parameter or prompt at fault; None if it is none, or not one alone.
    """

    def __init__(self, message: str = "", param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class ConfigError(OutriderError, ValueError):
    """Unknown option, or invalid value of an option."""


class RequestError(OutriderError, ValueError):
    """Invalid prompt or parameter of a request."""


class ContextError(RequestError):
    """Prompt with as many tokens as the context holds, or more."""


class ModelError(OutriderError):
    """Checkpoint that cannot be loaded or run."""


class CapacityError(OutriderError):
    """Memory limit of the engine that is too small for its configuration."""


class EngineError(OutriderError):
    """Failure of an engine step, which ended this request.  The engine remains usable."""


class RankError(EngineError):
    """Loss of a rank of a model on several processes.  The engine fails until the model is loaded again."""


def unknown(
    kind: str, name: object, valid: Iterable[str], where: str = "", elsewhere: Mapping[str, str] | None = None
) -> str:
    """Error message for an unknown `name`, with the nearest valid name and the list of all.

    where: context of the name, such as "speculative_config of method 'ngram'".
    elsewhere: hints for names of other programs.
    """
    valid = sorted(valid)
    hint = (elsewhere or {}).get(name) if isinstance(name, str) else None
    cure = nearest(name, valid) if hint is None else f" {hint}"
    return f"unknown {kind} {name!r}{f' in {where}' if where else ''}.{cure} Valid: {', '.join(valid)}."


def refuse_unknown(
    given: Iterable[str],
    valid: Iterable[str],
    kind: str,
    where: str = "",
    elsewhere: Mapping[str, str] | None = None,
    error: type[OutriderError] = ConfigError,
) -> None:
    """Raise `error` with the message of `unknown` for the first given name that is not valid."""
    valid = list(valid)
    for name in given:
        if name not in valid:
            raise error(unknown(kind, name, valid, where, elsewhere))


@contextmanager
def about(param: str) -> Iterator[None]:
    """Set the `param` of a RequestError that is raised within and names none."""
    try:
        yield
    except RequestError as error:
        error.param = error.param or param
        raise


@contextmanager
def writing(path: object, *others: type[Exception]) -> Iterator[None]:
    """Raise OSError that names the file, in place of one without a name; for a full disk with the cure.

    others: exceptions that a library raises instead.
    """
    kinds: tuple[type[Exception], ...] = (OSError, *others)
    try:
        yield
    except kinds as error:
        if getattr(error, "filename", None) is not None and not is_full(error):
            raise
        raise OSError(f"{str(path)!r} cannot be written: {write_fault(error)}") from error


@contextmanager
def saving(what: str, path: object, *others: type[Exception]) -> Iterator[None]:
    """Raise ConfigError for what a user asked to be written to a file.  others: as of `writing`."""
    kinds: tuple[type[Exception], ...] = (OSError, *others)
    try:
        yield
    except kinds as error:
        raise ConfigError(f"the {what} cannot be written to {str(path)!r}: {write_fault(error)}") from error


def check_writable(path: Path, what: str) -> None:
    """Raise ConfigError unless a file can be written: before anything slow.  A new one is not left behind."""
    path = path.expanduser()
    with saving(what, path):
        new = not path.exists()
        with path.open("ab"):
            pass
        if new:
            path.unlink()


def write_fault(error: Exception) -> str:
    """Why a file cannot be written, as one line: of a full disk the cure, too."""
    if is_full(error):
        return "the disk is full: free space on it, or write to another one."
    return first_line(error)


def is_full(error: Exception) -> bool:
    """Whether a disk or quota is full.  Libraries pass on the system's text alone."""
    return getattr(error, "errno", None) in (ENOSPC, EDQUOT) or os.strerror(ENOSPC) in str(error)


def shortened(value: object, most: int = 200) -> str:
    """repr of a value for an error message, truncated to `most` characters."""
    try:
        text = repr(value)
    except Exception:  # for instance an integer with more digits than Python prints
        return f"<{type(value).__name__} that cannot be shown>"
    return text if len(text) <= most else f"{text[:most]}…"


def nearest(name: object, valid: Iterable[str]) -> str:
    """Suggestion " Did you mean …?" with the nearest valid name.

    Matches the same name in another case, names within the difflib cutoff, or by prefix or suffix.
    Returns "" if no name is near.
    """
    valid = list(valid)
    near = [full for full in valid if full.lower() == str(name).lower()]
    near = near or difflib.get_close_matches(str(name), valid, n=1, cutoff=NEAR)
    near = near or [
        full
        for full in valid
        if len(str(name)) >= SHORTEST and (full.startswith(str(name)) or full.endswith(f"_{name}"))
    ]
    return f" Did you mean {near[0]!r}?" if near else ""


def first_line(error: Exception) -> str:
    """First line of an error's message.  A line that ends with a colon is joined with the next one."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    return " ".join(lines[:2]) if lines[0].endswith(":") else lines[0]
