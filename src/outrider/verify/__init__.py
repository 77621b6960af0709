"""Verification rules.  This folder is the registry: a module that defines a `Rule` registers its name."""

from __future__ import annotations

from functools import lru_cache

from outrider.core.registry import classes
from outrider.errors import ConfigError, unknown
from outrider.verify.base import Rule


@lru_cache(maxsize=1)
def rules() -> dict[str, type[Rule]]:
    """Rule name -> its class, found by looking into the folder."""
    return classes(__name__, __path__, Rule)


def names() -> list[str]:
    """Names of all rules, sorted."""
    return sorted(rules())


def rule(name: str) -> type[Rule]:
    """The class of a rule.  Raises ConfigError for an unknown name."""
    if not isinstance(name, str) or name not in rules():
        raise ConfigError(unknown("verification rule", name, names()))
    return rules()[name]
