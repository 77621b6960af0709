"""Which keys each row of one forward sees, and where its own key goes.

Every row sees the first `seen` slots of its request's table, then the slots of its own path: the keys of positions
0, 1, 2, …, in that order, wherever they lie.  A known token and a chain need no path; a node of a tree names its
ancestors and itself.  The plan is built once a step and shared by all layers.

        table of the request     0 1 2 3 4 5 6 │ node slots
        known token at 6         ■ ■ ■ ■ ■ ■ ■ │               seen 7, path ()
        node 2, child of node 0  ■ ■ ■ ■ ■ ■ ■ │ ■ · ■         seen 7, path (node 0, node 2): position 7 + 2 - 1 = 8

A *view* is a table that leaves some of a request's slots out: the first `pinned` of it are the request's first, the others stand
`shift` further on in the text than in the view, without gaps.  Positions are always those of the text, so rotations, sliding
windows and slopes are, too.  A plan has one `pinned`; where nothing is left out it does not matter.

        view, pinned 2, shift 3  0 1 · · · 5 6 │               known token at 6: seen 4, position 3 + 3 = 6
"""

from __future__ import annotations

from array import array
from collections.abc import Collection, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor


class StepInput:
    """Rows in the order in which they were added; `build` freezes them.

    After `build`: ids, positions, slots, seen, depths, tables int64 [n] (depths: how long a path; tables: addresses) one
    after the other in `host`, paths int32 [n, width] in `host_paths`; `segments` = (table, first row, rows) of each request,
    `adapted` = (first row, rows, adapter) of those that use a LoRA adapter.
    The `…_at` are addresses of the same, for the C kernels; tensors are only made where somebody asks, and plain arrays
    hold the numbers: right after a forward that swept the processor's caches, numpy and torch cost tens of microseconds a call.
    """

    __slots__ = (
        "_ids", "_paths", "_positions", "_seen", "_slots", "_tables", "adapted", "depths_at", "host", "host_paths", "ids_at", "length",
        "longest", "paths_at", "pinned", "positions_at", "seen_at", "segments", "slots_at", "tables_at", "width",
    )  # fmt: skip

    def __init__(self, pinned: int = 0) -> None:
        self.pinned = pinned
        self.segments: list[tuple[array[int], int, int]] = []
        self.adapted: list[tuple[int, int, Any]] = []
        self.length = self.longest = self.width = 0
        self._ids: list[int] = []
        self._positions: list[int] = []
        self._slots: list[int] = []
        self._seen: list[int] = []
        self._tables: list[int] = []
        self._paths: list[Sequence[int]] = []

    @staticmethod
    def bare(ids: Sequence[int]) -> StepInput:
        """Built, of tokens that stand nowhere: for whoever only reads `ids`."""
        step_input = StepInput()
        step_input.chain(array("i", range(len(ids))), 0, ids)
        return step_input.build()

    def chain(self, table: array[int], start: int, tokens: Sequence[int], shift: int = 0) -> None:
        """Known tokens at positions start … of a request whose slots are `table` (32-bit, one a position), or at start … of a view."""
        n, end = len(tokens), start + len(tokens)
        self._segment(table, n, end)
        self._ids += tokens
        self._positions += range(start + shift, end + shift)
        self._slots += table[start:end]
        self._seen += range(start + 1, end + 1)
        self._paths += [()] * n

    def node(self, table: array[int], seen: int, path: Sequence[int], token: int, shift: int = 0) -> None:
        """A guess that sees `seen` tokens and then the slots of its ancestors; the last slot of `path` is its own."""
        self.nodes(table, seen, [path], [token], shift)

    def nodes(
        self,
        table: array[int],
        seen: int,
        paths: Sequence[Sequence[int]],
        tokens: Sequence[int],
        shift: int = 0,
    ) -> None:
        """Guesses of one tree, each with a path of its own."""
        n, depths, first = len(paths), [*map(len, paths)], seen - 1 + shift
        deepest = max(depths)
        if deepest > self.width:
            self.width = deepest
        self._segment(table, n, seen + deepest)
        self._ids += tokens
        self._positions += [first + depth for depth in depths]
        self._slots += [path[-1] for path in paths]
        self._seen += [seen] * n
        self._paths += paths

    def block(self, table: array[int], seen: int, slots: Sequence[int], tokens: Sequence[int]) -> None:
        """Tokens side by side at positions seen …, each of which sees `seen` tokens and then all slots of the block."""
        first, n = self.length, len(tokens)
        self.nodes(table, seen, [slots] * n, tokens)
        self._positions[first:], self._slots[first:] = range(seen, seen + n), slots

    def only(self, rows: Collection[int]) -> StepInput:
        """A plan of some of its rows, in the same order."""
        part, rows = StepInput(self.pinned), set(rows)
        for table, first, count in self.segments:
            for i in (i for i in range(first, first + count) if i in rows):
                if self._paths[i]:
                    part.node(table, self._seen[i], self._paths[i], self._ids[i])
                else:
                    assert self._seen[i] == self._positions[i] + 1, "rows of a view are never taken apart"
                    part.chain(table, self._positions[i], self._ids[i : i + 1])
        for first, count, adapter in self.adapted:
            before, after = (sum(i < end for i in rows) for end in (first, first + count))
            if after > before:
                part.adapted.append((before, after - before, adapter))
        return part

    def adapt(self, first: int, adapter: Any) -> None:
        """The rows from `first` on belong to a request that uses `adapter`."""
        if self.adapted and self.adapted[-1][2] is adapter and sum(self.adapted[-1][:2]) == first:
            first = self.adapted.pop()[0]
        self.adapted.append((first, self.length - first, adapter))

    def _segment(self, table: array[int], n: int, sees: int) -> None:
        if self.segments and self.segments[-1][0] is table:
            table, first, count = self.segments[-1]
            self.segments[-1] = (table, first, count + n)
            self._tables += self._tables[-1:] * n
        else:
            self.segments.append((table, self.length, n))
            self._tables += [table.buffer_info()[0]] * n
        self.length += n
        if sees > self.longest:
            self.longest = sees

    def build(self) -> StepInput:
        depths = [*map(len, self._paths)] if self.width else [0] * self.length
        self.host = array(
            "q", [*self._ids, *self._positions, *self._slots, *self._seen, *depths, *self._tables]
        )
        first, step = self.host.buffer_info()[0], self.length * 8
        self.ids_at, self.positions_at, self.slots_at, self.seen_at, self.depths_at, self.tables_at = range(
            first, first + 6 * step, step
        )
        self.host_paths = array("i", self._flat(depths) if self.width else ())
        self.paths_at = self.host_paths.buffer_info()[0]
        return self

    def _flat(self, depths: list[int]) -> list[int]:
        """All paths, each as long as the longest."""
        if min(depths) == self.width:  # a level of a tree
            return [*chain.from_iterable(self._paths)]
        flat, blank = list[int](), [0] * self.width
        for path, depth in zip(self._paths, depths):
            flat += path
            flat += blank[depth:]
        return flat

    def translate(self, ids: Sequence[int]) -> None:
        """Of a built plan: every id becomes ids[id]."""
        self.host[: self.length] = array("q", [ids[i] for i in self.host[: self.length]])

    @property
    def ids(self) -> Tensor:
        return self._column(0)

    @property
    def positions(self) -> Tensor:
        return self._column(1)

    @property
    def slots(self) -> Tensor:
        return self._column(2)

    def _column(self, i: int) -> Tensor:
        return torch.frombuffer(self.host, dtype=torch.int64)[i * self.length : (i + 1) * self.length]

    def keys(self, first: int, count: int, table: array[int]) -> tuple[Tensor, Tensor]:
        """(slots [m], position of each in the text or -1 where a row must not look [count, m]) of one segment.

        What the C kernel does by walking; the reference kernels need it spelled out.
        """
        rows = range(first, first + count)
        common = max(self._seen[r] for r in rows)
        extra = sorted({slot for r in rows for slot in self._paths[r]})
        slots = torch.tensor([*table[:common], *extra])
        order = torch.full((count, len(slots)), -1)
        at = {slot: common + i for i, slot in enumerate(extra)}
        for i, r in enumerate(rows):
            seen, path = self._seen[r], self._paths[r]
            shift = max(
                0, self._positions[r] + 1 - seen - len(path)
            )  # within a block some of the path lies ahead
            order[i, :seen] = torch.arange(seen)
            order[i, self.pinned : seen] += shift
            for d, slot in enumerate(path):
                order[i, at[slot]] = seen + shift + d
        return slots, order
