"""Logits processors: what they are given, and what they are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Ids:
    """The tokens before a node, without a copy: those that are certain (prompt and output; this list only grows), then the path."""

    tokens: list[int]
    path: Sequence[int] = ()

    def __len__(self) -> int:
        return len(self.tokens) + len(self.path)

    def since(self, start: int) -> list[int]:
        return [*self.tokens[start:], *self.path[max(0, start - len(self.tokens)) :]]

    def tail(self, count: int) -> tuple[int, ...]:
        return tuple(self.since(len(self) - count))


class Processor(Protocol):
    def active(self, length: int) -> bool:
        """Whether a row at which `length` tokens are known (prompt, output and path) needs an edit; if not, it is not called."""

    def __call__(self, ids: Ids, logits: Tensor) -> Tensor:
        """logits [V], not to be written to.  Returns logits [V]."""
