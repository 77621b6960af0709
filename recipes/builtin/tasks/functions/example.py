"""Functions that tasks are made of, collected from their source text."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Tests = tuple[tuple[Any, ...], ...]
EXAMPLES: list[Example] = []


@dataclass(frozen=True)
class Example:
    """A function: descriptions, name, arguments, body without docstring, and arguments to check it with."""

    descriptions: tuple[str, ...]
    name: str
    arguments: tuple[str, ...]
    body: str
    tests: Tests

    def source(self, name: str | None = None, arguments: list[str] | tuple[str, ...] | None = None) -> str:
        """The function as text, under another name or with other arguments if given."""
        new = dict(zip(self.arguments, arguments or self.arguments))
        body = re.sub(r"\b[a-z]\w*\b", lambda m: new.get(m[0], m[0]), self.body)
        return f"def {name or self.name}({', '.join(new.values())}):\n{body}"

    def free_of(self, names: list[str]) -> bool:
        """True if the body uses none of the names."""
        return not set(names) & set(re.findall(r"\w+", self.body))


def example(*tests: tuple[Any, ...], also: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Collect the decorated function; its docstring is the first description, `also` the second."""

    def collect(function: Callable[..., Any]) -> Callable[..., Any]:
        lines = inspect.getsource(function).rstrip().split("\n")
        start = next(i for i, line in enumerate(lines) if line.startswith('    """'))
        about = (function.__doc__ or "").rstrip(".")
        arguments = tuple(inspect.signature(function).parameters)
        body = "\n".join(lines[start + 1 :])
        EXAMPLES.append(
            Example((about[0].lower() + about[1:], also), function.__name__, arguments, body, tests)
        )
        return function

    return collect
