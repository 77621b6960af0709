"""What an engine must not hold once its requests have ended: pages, open requests, rows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Set
from typing import Any

from outrider.core.row import Row
from outrider.llm import LLM

# Modules of the objects that a drafter consists of; the first includes outrider.drafting.
OWN_MODULES = ("outrider.draft", "outrider.heads", "outrider.cache")


def leaks(llm: LLM) -> list[str]:
    """The leaks of an engine whose requests have all ended, in words; empty if there are none.

    A controller may hold rows aborted between steps: it drops them at the next new row.
    """
    found = []
    try:
        llm.engine.check()
    except AssertionError as error:
        found.append(str(error) or "a slot is lost or owned twice")
    if llm.has_unfinished_requests():
        found.append("a request is still running")
    for name, value in _attributes(llm.engine.drafter):
        if _rows(value):
            found.append(f"the drafter still holds a finished request in {name!r}")
    controller = llm.engine.controller
    for name, value in vars(getattr(controller, "evidence", controller)).items():
        if any(row.finish_reason not in ("abort", "error") for row in _rows(value)):
            found.append(f"the controller still holds a finished request in {name!r}")
    return found


def _rows(value: Any) -> list[Row]:
    """The rows that are keys of a mapping, or in a set."""
    return [each for each in value if isinstance(each, Row)] if isinstance(value, (Mapping, Set)) else []


def _attributes(thing: Any, seen: set[int] | None = None) -> Iterator[tuple[str, Any]]:
    """Attributes (name, value) of a drafter and of the objects of OWN_MODULES in it."""
    seen = seen or set()
    seen.add(id(thing))
    for name, value in vars(thing).items():
        yield name, value
        for part in value if isinstance(value, list) else [value]:
            ours = type(part).__module__.startswith(OWN_MODULES) and hasattr(part, "__dict__")
            if ours and id(part) not in seen:
                yield from _attributes(part, seen)
