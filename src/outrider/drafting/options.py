"""Checks of options that depend on each other; core/validate.py checks single values."""

from __future__ import annotations

from typing import Any

from outrider.core.validate import is_whole
from outrider.errors import ConfigError


def refuse_idle(options: Any, on: bool, switch: str, *names: str) -> None:
    """Raise ConfigError if one of the options `names` is set without `switch`, which they modify."""
    for name in names:
        if not on and getattr(options, name) != getattr(type(options), name):
            raise ConfigError(
                f"{name} = {getattr(options, name)!r} has no effect without {switch}: set that too, or leave "
                f"it out."
            )


def check_exit(layer: Any, layers: int, model: str) -> int:
    """The number of the target's layers below an early exit.  Raises ConfigError."""
    if not is_whole(layer, 1, layers - 1):
        raise ConfigError(
            f"early_exit must be in 1 … {layers - 1}, as {model!r} has {layers} layers: got {layer!r}."
        )
    return int(layer)
