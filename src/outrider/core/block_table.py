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
    """The slots of one sequence.  `slots` is allocated once, so that its address never changes.

    Of a model with recurrent layers:
    state:    state slot
    length:   number of tokens after which the state is that in the slot
    resumed:  slot of the snapshot that the first step begins with
    branch:   border at which the text leaves the indexed ones, if that is behind the snapshot
    pending:  border -> slot of a snapshot whose page is not indexed yet
    latest:   slot of the last snapshot from decoding
    """

    slots: array[int]  # 32-bit [capacity]
    pages: list[int] = field(default_factory=list)
    room: int = 0  # positions that have a slot: those of `pages`
    nodes: list[int] = field(default_factory=list)  # index node of each indexed page, from the first
    root: Hashable = ROOT
    state: int = NO_STATE
    length: int = 0
    resumed: int = NO_STATE
    branch: int = 0
    pending: dict[int, int] = field(default_factory=dict)
    latest: int = NO_STATE

    def key_after(self, nodes: Sequence[int], tokens: Sequence[int]) -> tuple[Hashable, tuple[int, ...]]:
        """Key of the page after these nodes of the index."""
        at = len(nodes) * PAGE
        return nodes[-1] if nodes else self.root, tuple(tokens[at : at + PAGE])
