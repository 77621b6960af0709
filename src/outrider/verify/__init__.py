"""What may be emitted.  This folder is the registry: a module here that defines a `Rule` is the rule of its name."""

from __future__ import annotations

import importlib
import pkgutil
from functools import lru_cache

from outrider.errors import ConfigError, unknown
from outrider.verify.base import Rule


@lru_cache(maxsize=1)
def rules() -> dict[str, type[Rule]]:
    """Rule name -> its class, found by looking into the folder."""
    found = {}
    for module in pkgutil.iter_modules(__path__):
        loaded = importlib.import_module(f"{__name__}.{module.name}")
        for thing in vars(loaded).values():
            if isinstance(thing, type) and issubclass(thing, Rule) and thing.__module__ == loaded.__name__ and thing is not Rule:
                found[module.name] = thing
    return found


def names() -> list[str]:
    return sorted(rules())


def rule(name: str) -> type[Rule]:
    if not isinstance(name, str) or name not in rules():
        raise ConfigError(unknown("verification rule", name, names()))
    return rules()[name]
