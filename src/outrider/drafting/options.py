"""Checks of options that depend on each other; core/validate.py checks single values."""

from __future__ import annotations

from typing import Any

from outrider.errors import ConfigError


def refuse_idle(options: Any, on: bool, switch: str, *names: str) -> None:
    """Raise ConfigError if one of the options `names` is set without `switch`, which they modify."""
    for name in names:
        if not on and getattr(options, name) != getattr(type(options), name):
            raise ConfigError(
                f"{name} = {getattr(options, name)!r} has no effect without {switch}: set that too, or leave "
                f"it out."
            )
