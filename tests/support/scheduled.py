"""Rows and pools for tests of the scheduler."""

from __future__ import annotations

from typing import Any

from outrider import testing
from outrider.core.row import Row


class FakePool:
    """What is in each slot."""

    def __init__(self) -> None:
        self.content: dict[int, Any] = {}

    def move(self, sources: list[int], targets: list[int]) -> None:
        found = [self.content[s] for s in sources]
        self.content.update(zip(targets, found))


def make_row(name: str, tokens: list[int], new: int, index: int = 0, source: Row | None = None) -> Row:
    return testing.make_row(tokens, id=name, index=index, source=source, limit=len(tokens) + new)
