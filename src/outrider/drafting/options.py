"""Check of option values that several methods share."""

from __future__ import annotations

import math
from typing import Any

from outrider.errors import ConfigError


def is_int(value: Any, low: float = -math.inf, high: float = math.inf) -> bool:
    """Whether an option is an integer in [low, high].  bool does not count."""
    return isinstance(value, int) and not isinstance(value, bool) and low <= value <= high


def is_number(value: Any, low: float = -math.inf, high: float = math.inf) -> bool:
    """Whether an option is a number in [low, high].  bool and NaN do not count."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and low <= value <= high


def require(options: Any, name: str, valid: bool, expected: str) -> None:
    """Raise ConfigError if the option `name` is not valid; the message has expected and actual value."""
    if not valid:
        raise ConfigError(f"{name} must be {expected}, got {getattr(options, name)!r}.")


def refuse_idle(options: Any, on: bool, switch: str, *names: str) -> None:
    """Raise ConfigError if one of the options `names` is set although `switch`, which they modify, is not
    `on`.
    """
    for name in names:
        if not on and getattr(options, name) != getattr(type(options), name):
            raise ConfigError(
                f"{name} = {getattr(options, name)!r} has no effect without {switch}: set that too, or leave "
                f"it out."
            )


def refuse_parallel(size: Any) -> None:
    """Check vLLM's draft_tensor_parallel_size.  Raises ConfigError for more than one device."""
    if size != 1:
        raise ConfigError(f"draft_tensor_parallel_size must be 1, got {size!r}: one device runs the draft.")
