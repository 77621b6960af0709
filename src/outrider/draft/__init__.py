"""How to guess.  This folder is the registry: a module here that defines a `Drafter` is the method of its name."""

from __future__ import annotations

from functools import lru_cache

from outrider.draft.base import Drafter
from outrider.errors import ConfigError, unknown
from outrider.registry import classes


@lru_cache(maxsize=1)
def methods() -> dict[str, type[Drafter]]:
    """Method name -> its class, found by looking into the folder."""
    return classes(__name__, __path__, Drafter)


def names() -> list[str]:
    return sorted(methods())


def method(name: str) -> type[Drafter]:
    if not isinstance(name, str) or name not in methods():
        raise ConfigError(unknown("speculative method", name, names()))
    return methods()[name]
