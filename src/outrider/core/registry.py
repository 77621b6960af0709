"""A folder as a registry: a module in it that defines a class of a kind is known by the module's name."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterable
from typing import TypeVar

T = TypeVar("T")


def classes(package: str, path: Iterable[str], kind: type[T]) -> dict[str, type[T]]:
    """Module name -> the class of this kind that it defines itself, for all modules in a package's path."""
    modules = [importlib.import_module(f"{package}.{module.name}") for module in pkgutil.iter_modules(path)]
    return {
        module.__name__.rpartition(".")[2]: thing
        for module in modules
        for thing in vars(module).values()
        if isinstance(thing, type) and issubclass(thing, kind) and thing.__module__ == module.__name__
        if thing is not kind
    }
