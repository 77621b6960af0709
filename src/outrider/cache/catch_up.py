"""Catch-up of a drafter's KV pool: which positions have K/V there, and which hidden states are pending.

A drafter sees the target's hidden states one step after the tokens, so its pool lags behind the target's:

    position    0 …        filled │ end
                K/V in the pool   │ not computed by the target yet
                    first …   end │
                    pending states│

`filled` never exceeds `end`.  States stay pending after their K/V is written, until the step is known to
have succeeded: a step that fails is repeated, and reads them again.

Positions whose states were lost (`start` > `end` in `append`) leave a gap.  Later positions are still
read, but `filled` stays in front of the gap, so that no page behind it is shared.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import torch
from torch import Tensor

from outrider.core.block_table import PAGE
from outrider.core.device import to_device
from outrider.core.row import Row
from outrider.core.step import Commit

MAX_DEFERRED = 4096  # rows of forwards whose states wait for a cursor, of all requests together
MAX_PENDING = 64  # states of a row without drafts that may be pending; then they are read all the same


@dataclass(slots=True)
class Cursor:
    """Progress of one request: K/V of positions below `filled`, pending states of `first` … `end` - 1."""

    filled: int
    first: int
    states: list[Tensor] = field(default_factory=list)  # [n, width] each
    count: int = 0  # rows of all `states`
    num_written: int = 0  # tensors in `states` whose K/V was written by a step that may still fail

    @property
    def end(self) -> int:
        """Position after the last pending state."""
        return self.first + self.count

    def append(self, start: int, states: Tensor) -> None:
        """Add states [n, width] from `start` on.  A start other than `end` drops the pending ones."""
        if start != self.end:
            self.first, self.count, self.num_written = start, 0, 0
            self.states.clear()
            self.filled = min(self.filled, start)
        self.states.append(states)
        self.count += len(states)

    def mark_written(self) -> None:
        """Record that K/V of all pending states is in the pool."""
        self.num_written = len(self.states)
        if self.first <= self.filled:
            self.filled = self.end

    def drop_written(self, keep: int = 0) -> None:
        """Forget the states whose K/V was written, except the last `keep` rows."""
        written = self.states[: self.num_written]
        kept: list[Tensor] = []
        if written and keep:  # a copy: a view would keep the whole chunk alive
            last = written[-1] if len(written[-1]) >= keep else torch.cat([part[-keep:] for part in written])
            kept = [last[-keep:].clone()]
        dropped = sum(map(len, written)) - sum(map(len, kept))
        self.first, self.count = self.first + dropped, self.count - dropped
        self.states[: self.num_written] = kept
        self.num_written = 0


class DeferredStates:
    """Steps whose states are not appended to cursors yet, oldest first.

    While a drafter is not asked, its states are deferred: appended together, they cost a few calls for each
    row, and not for each row and step.  num_rows: of their forwards.
    """

    def __init__(self) -> None:
        self.commits: list[Commit] = []
        self.num_rows = 0

    def add(self, commit: Commit) -> None:
        self.commits.append(commit)
        self.num_rows += commit.states.num_rows

    def append_to(self, catch_up: CatchUp, wanted: Sequence[int], keep: int) -> None:
        """Append the wanted states to the cursors of their rows, which keep so many written ones."""
        commits, self.commits, self.num_rows = self.commits, [], 0
        for group in _successive(commits):
            for step, own in zip(group[0].batch, _states_of(group, wanted)):
                cursor = catch_up.cursor(step.row, step.start)
                cursor.drop_written(keep)
                cursor.append(step.start, own)


def _states_of(group: Sequence[Commit], wanted: Sequence[int]) -> Sequence[Tensor]:
    """The wanted states of each row in successive steps."""
    if len(group) == 1:
        return [group[0].states.of(r, wanted) for r in range(len(group[0].batch))]
    parts = [commit.states.all(wanted) for commit in group]
    firsts, index, counts = [0, *accumulate(map(len, parts))], list[int](), list[int]()
    for r in range(len(group[0].batch)):
        before = len(index)
        for first, commit in zip(firsts, group):
            index += [first + place for place in commit.states.places[r]]
        counts.append(len(index) - before)
    places = to_device(torch.tensor(index, dtype=torch.int64), parts[0].device)
    return torch.split(torch.cat(parts).index_select(0, places), counts)


def _successive(commits: Sequence[Commit]) -> Iterator[list[Commit]]:
    """Groups of steps of the same rows, without a gap in their positions."""
    group = list[Commit]()
    for commit in commits:
        if group and not _follows(group[-1], commit):
            yield group
            group = []
        group.append(commit)
    if group:
        yield group


def _follows(before: Commit, after: Commit) -> bool:
    return len(before.batch) == len(after.batch) and all(
        old.row is new.row and old.start + len(places) == new.start
        for old, new, places in zip(before.batch, after.batch, before.states.places)
    )


class CatchUp:
    """Cursors of all requests.  offset: slot of position t is t + offset."""

    def __init__(self, offset: int = 0) -> None:
        self.offset = offset
        self.cursors: dict[Row, Cursor] = {}

    def cursor(self, row: Row, start: int) -> Cursor:
        """The cursor of a row.  A new row begins at `start`, after the positions of shared pages."""
        if row not in self.cursors:
            self.cursors[row] = Cursor(start, start)
        return self.cursors[row]

    def filled(self, row: Row) -> int:
        """Number of slots of a row that hold complete K/V; pages of these can be shared."""
        cursor = self.cursors.get(row)
        return row.computed if cursor is None else min(row.computed, cursor.filled + self.offset)

    def forget(self, row: Row) -> None:
        self.cursors.pop(row, None)


@dataclass(slots=True)
class TokenCursor:
    """Progress of one request in a drafter that reads tokens: K/V of positions below `filled`.

    marked: number of leading pages that are known to be filled, and are no longer in `unfilled`.
    """

    filled: int
    marked: int

    def reach(self, end: int) -> None:
        """Record that K/V below `end` is in the pool."""
        self.filled = end


class TokenCatchUp:
    """Progress of all requests of a drafter that reads tokens, and so may catch up whenever it is asked.

    Pages are shared before this drafter has filled them.
    unfilled: shared pages without its K/V.  A row that shares one begins to catch up there.
    """

    def __init__(self) -> None:
        self.cursors: dict[Row, TokenCursor] = {}
        self.unfilled: set[int] = set()

    def cursor(self, row: Row, start: int) -> TokenCursor:
        """The cursor of a row.  A new row has the K/V of the pages that it shares, up to an unfilled one."""
        if row not in self.cursors:
            assert row.table is not None
            pages = row.table.pages[: -(-start // PAGE)]
            filled = next((i for i, page in enumerate(pages) if page in self.unfilled), len(pages))
            known = min(start, filled * PAGE)
            if row.source in self.cursors:  # its last page may be a copy of one that is not filled
                known = min(known, self.cursors[row.source].filled)
            self.cursors[row] = TokenCursor(known, min(filled, known // PAGE))
        return self.cursors[row]

    def share(self, row: Row) -> int:
        """Number of positions whose pages may be shared: all.  Marks those that are not filled."""
        cursor, table = self.cursors.get(row), row.table
        if cursor is not None and table is not None:
            full = cursor.filled // PAGE
            self.unfilled.difference_update(table.pages[cursor.marked : full])
            self.unfilled.update(table.pages[max(full, cursor.marked) : row.computed // PAGE])
            cursor.marked = max(cursor.marked, full)
        return row.computed

    def forget(self, row: Row) -> None:
        self.cursors.pop(row, None)
