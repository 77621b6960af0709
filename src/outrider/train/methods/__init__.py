"""The registry of trainable methods: a module that defines a `Method` is the method of its name.

It is a module of this folder, or that of the drafter itself, as in a folder of OUTRIDER_DRAFTERS.
"""

from __future__ import annotations

from functools import lru_cache

from outrider import draft
from outrider.core.registry import classes
from outrider.errors import ConfigError, unknown
from outrider.train.base import Method

ALIASES = {"eagle1": "eagle", "eagle2": "eagle", "medusa1": "medusa", "early_exit": "layerskip"}


@lru_cache(maxsize=1)
def methods() -> dict[str, type[Method]]:
    """Method name -> its class."""
    draft.methods()  # it adds the folders of OUTRIDER_DRAFTERS to the path
    return classes(draft.__name__, draft.__path__, Method) | classes(__name__, __path__, Method)


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
