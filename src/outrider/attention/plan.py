"""Which keys each row of one forward sees, and where its own key goes.

Every row sees the first `seen` slots of its request's table, then the slots of its own path: the keys of positions
0, 1, 2, …, in that order, wherever they lie.  A known token and a chain need no path; a node of a tree names its
ancestors and itself.  The plan is built once a step and shared by all layers.

        table of the request     0 1 2 3 4 5 6 │ node slots
        known token at 6         ■ ■ ■ ■ ■ ■ ■ │               seen 7, path ()
        node 2, child of node 0  ■ ■ ■ ■ ■ ■ ■ │ ■ · ■         seen 7, path (node 0, node 2): position 7 + 2 - 1 = 8
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor


class Plan:
    """Rows in the order in which they were added; `build` freezes them.

    After `build`: ids, positions, slots int64 [n]; seen, depths int64 [n] (how much of the table, how long a path);
    paths int32 [n, width]; `segments` = (table, first row, rows) of each request.
    """

    def __init__(self) -> None:
        self.segments: list[tuple[np.ndarray, int, int]] = []
        self.length = 0
        self._ids: list[int] = []
        self._positions: list[int] = []
        self._slots: list[int] = []
        self._seen: list[int] = []
        self._paths: dict[int, Sequence[int]] = {}

    def chain(self, table: np.ndarray, start: int, tokens: Sequence[int]) -> None:
        """Known tokens at positions start … of a request whose slots are `table` (int32, one a position)."""
        n = len(tokens)
        self._segment(table, n)
        self._ids.extend(tokens)
        self._positions.extend(range(start, start + n))
        self._slots.extend(table[start : start + n].tolist())
        self._seen.extend(range(start + 1, start + n + 1))

    def node(self, table: np.ndarray, seen: int, path: Sequence[int], token: int) -> None:
        """A guess that sees `seen` tokens and then the slots of its ancestors; the last slot of `path` is its own."""
        self._paths[self.length] = path
        self._segment(table, 1)
        self._ids.append(token)
        self._positions.append(seen + len(path) - 1)
        self._slots.append(path[-1])
        self._seen.append(seen)

    def _segment(self, table: np.ndarray, n: int) -> None:
        if self.segments and self.segments[-1][0] is table:
            table, first, count = self.segments[-1]
            self.segments[-1] = (table, first, count + n)
        else:
            self.segments.append((table, self.length, n))
        self.length += n

    def build(self) -> Plan:
        """Freezes the plan into tensors, and notes the addresses that the C kernels take."""
        n = self.length
        host = np.array((self._ids, self._positions, self._slots, self._seen), dtype=np.int64)
        self.ids, self.positions, self.slots, self.seen = torch.from_numpy(host)
        self.width = max(map(len, self._paths.values()), default=0)
        paths, depths = np.zeros((n, self.width), dtype=np.int32), np.zeros(n, dtype=np.int64)
        for row, path in self._paths.items():
            paths[row, : len(path)] = path
            depths[row] = len(path)
        pointers = np.repeat(
            np.array([table.ctypes.data for table, _, _ in self.segments], dtype=np.int64), [count for _, _, count in self.segments]
        )
        self.paths, self.depths = torch.from_numpy(paths), torch.from_numpy(depths)
        self.longest = int((host[3] + depths).max(initial=0))
        self.positions_at, self.slots_at, self.seen_at = host[1].ctypes.data, host[2].ctypes.data, host[3].ctypes.data
        self.paths_at, self.depths_at, self.tables_at = paths.ctypes.data, depths.ctypes.data, pointers.ctypes.data
        self._alive = (host, paths, depths, pointers)  # the addresses above point into these
        return self

    def keys(self, first: int, count: int, table: np.ndarray) -> tuple[Tensor, Tensor]:
        """(slots [m], position of each in the row's order or -1 where it must not look [count, m]) of one segment.

        What the C kernel does by walking; the reference kernels need it spelled out.
        """
        rows = range(first, first + count)
        common = max(self._seen[r] for r in rows)
        extra = sorted({slot for r in rows for slot in self._paths.get(r, ())})
        slots = torch.tensor(table[:common].tolist() + extra)
        order = torch.full((count, len(slots)), -1)
        at = {slot: common + i for i, slot in enumerate(extra)}
        for i, r in enumerate(rows):
            order[i, : self._seen[r]] = torch.arange(self._seen[r])
            for d, slot in enumerate(self._paths.get(r, ())):
                order[i, at[slot]] = self._seen[r] + d
        return slots, order
