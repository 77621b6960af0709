"""Block table: the cache slots of one sequence."""

from __future__ import annotations

from array import array
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

PAGE = 16
NO_STATE = -1
ROOT = 0  # parent of the first page of a sequence, unless `Row.cache_root` is another one


@dataclass(eq=False)
class BlockTable:
    """The slots of one sequence.  `slots` is allocated once, so that its address never changes."""

    slots: array[int]  # 32-bit [capacity]
    pages: list[int] = field(default_factory=list)
    room: int = 0  # positions that have a slot: those of `pages`
    nodes: list[int] = field(default_factory=list)  # index node of each indexed page, from the first
    root: Hashable = ROOT
    state: int = NO_STATE  # state slot, of a model with recurrent layers

    def key(self, tokens: Sequence[int]) -> tuple[Hashable, tuple[int, ...]]:
        """Key of the next page to be indexed."""
        at = len(self.nodes) * PAGE
        return self.nodes[-1] if self.nodes else self.root, tuple(tokens[at : at + PAGE])
