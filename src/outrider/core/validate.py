"""Declarative checks of values that come from outside: options, requests and files.

@dataclass(frozen=True)
class Options(Checked):
    num_pages: Annotated[int, whole(1)] = 16    # its kind beside its type
    device: Text | None = None
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, get_args, get_type_hints

from outrider.errors import ConfigError, OutriderError, refuse_unknown, shortened, unknown


@dataclass(frozen=True)
class Kind:
    """Set of allowed values of an option.

    text:  completes the sentence "must be …" in errors
    words: the allowed values, if they are a few words
    hints: for values of other programs
    """

    text: str
    accepts: Callable[[Any], bool]
    words: Sequence[str] = ()
    hints: Mapping[str, str] = field(default_factory=dict, hash=False)

    def check(self, value: Any, name: str, error: type[OutriderError] = ConfigError) -> None:
        """Raise `error` if a value is not allowed.  name: of the option."""
        if not self.accepts(value):
            if self.words:
                raise error(unknown(name, value, self.words, elsewhere=self.hints), name)
            raise error(f"{name} must be {self.text}, got {shortened(value)}.", name)


def is_whole(value: Any, least: float = -math.inf, most: float = math.inf) -> bool:
    """Whether this is an int (True and False are not) of a range."""
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= most


def is_real(value: Any) -> bool:
    """Whether this is an int or a float, NaN excluded."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and value == value


def whole(least: int | None = None, most: int | None = None) -> Kind:
    """An integer of a range; None sets no bound."""
    bounds = "" if least is None else f" of at least {least}" if most is None else f" in {least} … {most}"
    low, high = -math.inf if least is None else least, math.inf if most is None else most
    return Kind("a whole number" + bounds, lambda value: is_whole(value, low, high))


def real(text: str, accepts: Callable[[float], bool]) -> Kind:
    """A number; `text` names the range, such as "a number in (0, 1]"."""
    return Kind(text, lambda value: is_real(value) and accepts(value))


def optional(kind: Kind) -> Kind:
    """None, or a value of a kind."""
    return Kind(
        f"{kind.text} or None", lambda value: value is None or kind.accepts(value), kind.words, kind.hints
    )


def either(kind: Kind, *words: str) -> Kind:
    """A value of a kind, or one of some words."""
    text = " or ".join([kind.text, *(f'"{word}"' for word in words)])
    return Kind(text, lambda value: value in words if isinstance(value, str) else kind.accepts(value))


def one_of(*words: str, hints: Mapping[str, str] | None = None) -> Kind:
    """One of some words.  hints: for words of other programs."""
    return Kind(" or ".join(words), lambda value: value in words, words, hints or {})


def list_of(what: str, kind: Kind, least: int = 1) -> Kind:
    """A list of at least so many values of a kind; `what`: their name in the plural."""

    def accepts(values: Any) -> bool:
        return isinstance(values, (list, tuple)) and len(values) >= least and all(map(kind.accepts, values))

    return Kind(f"a list of {what}", accepts)


def made_of(
    given: Mapping[str, Any],
    kinds: Sequence[type[Any]],
    where: str,
    others: Iterable[str] = (),
    elsewhere: Mapping[str, str] | None = None,
) -> list[Any]:
    """Options of several classes, each of its own keys in `given`.

    others: keys that are read elsewhere.  elsewhere: hints for keys of other programs.
    Raises ConfigError for a key of no class, suggesting the nearest valid one.
    """
    known = {*others}
    for kind in kinds:
        known |= {field.name for field in fields(kind)}
    refuse_unknown(given, known, "key", where, elsewhere)
    made: list[Any] = []
    for kind in kinds:
        own = {field.name for field in fields(kind)}
        made.append(kind(**{key: value for key, value in given.items() if key in own}))
    return made


SHARE = real("a number in [0, 1]", lambda value: 0 <= value <= 1)
POSITIVE = real("a number above 0", lambda value: 0 < value < math.inf)
FLAG = Kind("True or False", lambda value: isinstance(value, bool))
TEXT = Kind("a string", lambda value: isinstance(value, str) and bool(value))


OBJECT = Kind("a dict, or its JSON text", lambda value: value is None or isinstance(value, Mapping))
Flag = Annotated[bool, FLAG]
JsonObject = Annotated[Mapping[str, Any] | None, OBJECT]  # `json_text` reads it
Text = Annotated[str, TEXT]
Count = Annotated[int, whole(1)]
Natural = Annotated[int, whole(0)]
Share = Annotated[float, SHARE]
Positive = Annotated[float, POSITIVE]


@lru_cache(maxsize=256)
def kinds_of(options: type[Any]) -> dict[str, Kind]:
    """The kinds in the annotations of a class, by field.  `X | None` also allows None."""
    found = {}
    for name, hint in get_type_hints(options, include_extras=True).items():
        kind, parts = _kind_in(hint), get_args(hint)
        if kind is None and type(None) in parts:
            kind = next((optional(inner) for inner in map(_kind_in, parts) if inner is not None), None)
        if kind is not None:
            found[name] = kind
    return found


def _kind_in(hint: Any) -> Kind | None:
    return next((part for part in getattr(hint, "__metadata__", ()) if isinstance(part, Kind)), None)


def check_fields(
    options: Any, error: type[OutriderError] = ConfigError, given: Collection[str] | None = None
) -> None:
    """Check the attributes of `options` that have a kind.  Raises `error` naming a bad one.

    given: only these, where the others are defaults.
    """
    for name, kind in kinds_of(options.__class__).items():
        if given is None or name in given:
            kind.check(getattr(options, name), name, error)


def path_text(value: Any) -> Any:
    """A path object as text; any other value as it is."""
    return os.fspath(value) if isinstance(value, os.PathLike) else value


def json_text(value: Any, name: str) -> Any:
    """The value of a JSON text, as the command line gives it; others as they are.  Raises ConfigError."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{name} is no JSON: {error}.") from error


def text_of(file: str | Path, what: str, error: type[OutriderError] = ConfigError) -> str:
    """The text in a user's file.  what: it, in errors.  Raises `error` if the file cannot be read."""
    try:
        return Path(os.path.expanduser(file)).read_text(encoding="utf-8")
    except (OSError, ValueError, RuntimeError) as failure:  # also a NUL in the name, and an unknown user's ~
        raise error(f"{what} {str(file)!r} cannot be read: {failure}") from failure


@dataclass(frozen=True)
class NoOptions:
    """Options of methods and rules that have none."""


class Checked:
    """Base of dataclasses whose fields are checked when one is made.  Raises ConfigError."""

    def __post_init__(self) -> None:
        check_fields(self)
