"""The registry of trainable methods: a module that defines a `Method` is the method of its name."""

from __future__ import annotations

from functools import lru_cache

from outrider.core.registry import classes
from outrider.errors import ConfigError, unknown
from outrider.train.base import Method

ALIASES = {"eagle1": "eagle", "eagle2": "eagle", "medusa1": "medusa", "early_exit": "layerskip"}


@lru_cache(maxsize=1)
def methods() -> dict[str, type[Method]]:
    """Method name -> its class."""
    return classes(__name__, __path__, Method)


def method(name: str) -> type[Method]:
    """Raise ConfigError for a method that cannot be trained."""
    name = name.replace("-", "_")
    name = ALIASES.get(name, name)
    for own, made in methods().items():
        if name in made.variants:
            raise ConfigError(f"{name!r} is trained by {own!r} with the option {made.variants[name]!r}.")
    if name not in methods():
        raise ConfigError(unknown("method to train", name, sorted(methods())))
    return methods()[name]
