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

import torch
from torch import Tensor

from outrider.core.block_table import PAGE
from outrider.core.row import Row
from outrider.core.step import Commit, States

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
        return self.first + self.count

    def append(self, start: int, states: Tensor) -> None:
        """Add states [n, width] from `start` on.  A start other than `end` drops the pending ones."""
        if start != self.end:
            self.first, self.count, self.num_written = start, 0, 0
            self.states.clear()
            self.filled = min(self.filled, start)
        self.states.append(states)
        self.count += states.size(0)  # `len` takes ten times as long

    def mark_written(self) -> None:
        """Record that K/V of all pending states is in the pool."""
        self.num_written = len(self.states)
        if self.first <= self.filled:
            self.filled = self.end

    def drop_written(self, keep: int = 0) -> None:
        """Forget the states whose K/V was written, except the last `keep` rows."""
        if not self.num_written:
            return
        if not keep and self.num_written == len(self.states):  # after most steps
            self.first, self.count, self.num_written = self.end, 0, 0
            self.states.clear()
            return
        written = self.states[: self.num_written]
        kept: list[Tensor] = []
        if written and keep:  # a copy: a view would keep the whole chunk alive
            enough = written[-1].size(0) >= keep
            last = written[-1] if enough else torch.cat([part[-keep:] for part in written])
            kept = [last[-keep:].clone()]
        dropped = sum([part.size(0) for part in written]) - sum([part.size(0) for part in kept])
        self.first, self.count = self.first + dropped, self.count - dropped
        self.states[: self.num_written] = kept
        self.num_written = 0


def drop_written(cursors: Sequence[Cursor], keep: int) -> None:
    """Forget the states of these cursors, whose K/V was all written, except the last `keep` rows of each.

    One copy for all whose last states are so many: on a device a copy costs more than what it copies.
    """
    long = list[Cursor]()
    for cursor in cursors:
        if cursor.states[-1].size(0) >= keep:
            long.append(cursor)
        else:
            cursor.drop_written(keep)
    if long:
        last = torch.cat([cursor.states[-1][-keep:] for cursor in long])
        for cursor, kept in zip(long, torch.split(last, keep)):
            cursor.first, cursor.count, cursor.num_written = cursor.end - keep, keep, 0
            cursor.states[:] = [kept]


@dataclass(slots=True)
class PlainSteps:
    """Successive steps of the same rows, each with one state of every row.

    starts: position of the first state of each row.  states: of each step, in the order of the rows.
    """

    rows: list[Row]
    starts: list[int]
    states: list[States]

    def continued_by(self, rows: Sequence[Row], start: int) -> bool:
        """Whether a step of these rows, of which the first is at position `start`, comes next."""
        return rows == self.rows and start == self.starts[0] + len(self.states)

    def by_row(self, wanted: Sequence[int]) -> Iterator[tuple[Row, int, Tensor]]:
        """Each row, its first position, and the wanted states from there on, [steps, width]."""
        parts = [states.all(wanted) for states in self.states]
        return zip(self.rows, self.starts, torch.stack(parts, dim=1).unbind())


class DeferredStates:
    """States of steps that no cursor has yet, oldest first.

    While a drafter is not asked, its states are deferred: appended together, they cost a few calls for each
    row, and not for each row and step.  Those of rows that have ended by then are dropped.
    ended: such rows.  num_steps, num_rows: of steps, and of their forwards.  most_pending: most states of a
    cursor, when some were appended last.
    """

    def __init__(self) -> None:
        self.ended: set[Row] = set()
        self.clear()
        self.most_pending = 0

    def clear(self) -> None:
        self.steps: list[PlainSteps | Commit] = []
        self.ended.clear()
        self.num_steps = self.num_rows = 0

    def add(self, commit: Commit) -> None:
        """Add a step, whose rows have cursors."""
        states, rows, start = commit.states, commit.batch.rows, commit.batch[0].start
        last = self.steps[-1] if self.steps else None
        if states.num_rows > len(rows):
            self.steps.append(commit)
        elif isinstance(last, PlainSteps) and last.continued_by(rows, start):
            last.states.append(states)
        else:
            self.steps.append(PlainSteps(rows, [step.start for step in commit.batch], [states]))
        self.num_steps += 1
        self.num_rows += states.num_rows

    def note(self, cursor: Cursor) -> None:
        """Take in how many states of a row are pending that no step has deferred."""
        self.most_pending = max(self.most_pending, cursor.count)

    def due(self, rows: int, least: int) -> bool:
        """Whether one of so many rows may have so many pending states that they have to be read, or all have
        too many.

        least: states that are pending without deferred ones.
        """
        pending = max(self.most_pending, least) + self.num_steps
        # rows that have ended are kept, too, until states are appended
        most = max(pending, len(self.ended))
        return most >= MAX_PENDING or self.num_rows >= min(MAX_PENDING * rows, MAX_DEFERRED)

    @property
    def least_read(self) -> int:
        """Pending states of a row without drafts from which on they are read.

        Once one row has too many, those of others that have half as many are read beside them: otherwise some
        row would be due in every step.
        """
        return MAX_PENDING // 2 if self.most_pending >= MAX_PENDING else MAX_PENDING

    def append_to(self, catch_up: CatchUp, wanted: Sequence[int], keep: int) -> None:
        """Append the wanted states to the cursors of their rows, which keep so many written ones."""
        steps = self.steps
        self.clear()
        for group in steps:
            states = group.by_row(wanted) if isinstance(group, PlainSteps) else _by_row(group, wanted)
            for row, start, own in states:
                if (cursor := catch_up.cursors.get(row)) is not None:
                    cursor.drop_written(keep)
                    cursor.append(start, own)
        self.most_pending = max([cursor.count for cursor in catch_up.cursors.values()], default=0)


def _by_row(commit: Commit, wanted: Sequence[int]) -> Iterator[tuple[Row, int, Tensor]]:
    """Each row of a step, its first position, and the wanted states from there on, [positions, width]."""
    for step, own in zip(commit.batch, commit.states.of_all(wanted)):
        yield step.row, step.start, own


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
