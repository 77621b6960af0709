"""Rows and pools for tests of the scheduler."""

from __future__ import annotations

from typing import Any

from outrider import SamplingParams
from outrider.core.row import Row


class FakePool:
    def __init__(self) -> None:
        self.content: dict[int, Any] = {}

    def move(self, sources: list[int], targets: list[int]) -> None:
        found = [self.content[s] for s in sources]
        self.content.update(zip(targets, found))


def make_row(name: str, tokens: list[int], new: int, index: int = 0, source: Row | None = None) -> Row:
    params = SamplingParams(max_tokens=new)
    return Row(
        id=name, index=index, tokens=list(tokens), prompt=len(tokens), params=params,
        distribution=params.distribution, seed=0, processors=(),
        limit=len(tokens) + new, ending=frozenset(), source=source,
    )  # fmt: skip
