"""How to guess.  This folder is the registry: a module here that defines a `Drafter` is the method of its name."""

from __future__ import annotations

import importlib
import pkgutil
from functools import lru_cache

from outrider.draft.base import Drafter
from outrider.errors import ConfigError, unknown


@lru_cache(maxsize=1)
def methods() -> dict[str, type[Drafter]]:
    """Method name -> its class, found by looking into the folder."""
    found = {}
    for module in pkgutil.iter_modules(__path__):
        loaded = importlib.import_module(f"{__name__}.{module.name}")
        for thing in vars(loaded).values():
            if isinstance(thing, type) and issubclass(thing, Drafter) and thing.__module__ == loaded.__name__ and thing is not Drafter:
                found[module.name] = thing
    return found


def names() -> list[str]:
    return sorted(methods())


def method(name: str) -> type[Drafter]:
    if not isinstance(name, str) or name not in methods():
        raise ConfigError(unknown("speculative method", name, names()))
    return methods()[name]
