"""What may be emitted.  A module here that defines `verify` is the rule of its name."""

from __future__ import annotations

import importlib
import pkgutil

from outrider.errors import ConfigError, unknown
from outrider.types import Verifier


def names() -> list[str]:
    return sorted(module.name for module in pkgutil.iter_modules(__path__))


def rule(name: str) -> Verifier:
    if name not in names():
        raise ConfigError(unknown("verification rule", name, names()))
    verify: Verifier = importlib.import_module(f"{__name__}.{name}").verify
    return verify
