"""Recurrent states of the rows of a step: what it replays, and which snapshots it takes.

The states after the prompt's last full page are kept, those at some borders before it, and the latest ones of
the output:

- where the prompt leaves the indexed texts (arXiv:2411.19379): the next text with this beginning resumes
  there
- at multiples of an interval, at least `LEAST_INTERVAL`, so that a prompt has few of all snapshots
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from outrider.cache.pages import Cache
from outrider.cache.states import StatePool
from outrider.core.block_table import NO_STATE, PAGE, BlockTable
from outrider.core.recurrent import RecurrentRows, Replay
from outrider.core.row import Row
from outrider.core.step import Batch, RowStep

LEAST_INTERVAL = 256  # tokens
SHARE = 16  # a prompt has at most one of so many snapshots at multiples of its interval, besides the others


class RowStates:
    """State slots of rows, of which a step begins with `begin` and ends with `settle`.

    accepted: table -> accepted nodes, whose states the next forward computes.  They are numbered among all
    draft nodes of the last forward.
    """

    def __init__(self, cache: Cache, pool: StatePool) -> None:
        self.cache, self.pool = cache, pool
        self.accepted: dict[BlockTable, Sequence[int]] = {}

    @classmethod
    def of(cls, cache: Cache) -> RowStates | None:
        """None for a target without recurrent layers."""
        states = cache.pools[0].states
        return None if states is None else cls(cache, states)

    def begin(self, batch: Batch) -> RecurrentRows:
        """The record of a step for recurrent layers.  Rows that resume have the states of their snapshots."""
        # replays of all rows, also of those that the step leaves out: its forward keeps other inputs
        accepted, self.accepted = self.accepted, {}
        rows, first, taken = RecurrentRows(), 0, dict[BlockTable, dict[int, int]]()
        for step in batch:
            table = step.row.table
            assert table is not None
            if table.resumed != NO_STATE:
                self.pool.copy(table.resumed, table.state)
                table.resumed = NO_STATE
            rows.add(table.state, first + step.known - 1)
            for border, decodes in self._borders(step, table):
                slot = self.cache.snapshots.add(table, border, decodes)
                after = border - self.cache.snapshots.lag  # so many tokens
                if slot != NO_STATE and after > step.start:
                    rows.copies[first + after - step.start - 1] = slot
                elif slot != NO_STATE:
                    taken.setdefault(table, {})[after - table.length - 1] = slot
            first += step.known + len(step.tree.tokens)
        # A border that replays cross while their row is left out has no snapshot: the row's next one has.
        for table, kept in accepted.items():
            if table.state != NO_STATE:
                rows.replays.append(Replay(table.state, kept, taken.get(table, {})))
                table.length += len(kept)
        for step in batch:
            assert step.row.table is not None
            step.row.table.length = step.end
        return rows

    def settle(self, batch: Batch) -> None:
        """Note the accepted nodes of a committed step, and give its snapshots to indexed pages."""
        first = 0
        for step in batch:
            if step.row.table is not None and step.row.table.pending:
                self.cache.attach(step.row.table, step.row.tokens)
            if step.accepted and step.row.table is not None:
                self.accepted[step.row.table] = [first + node for node in step.accepted]
            first += len(step.tree.tokens)

    def shares_prompt(self, row: Row) -> bool:
        """Whether a snapshot of its prompt serves the other samples of a request."""
        return self.cache.prefix_caching and row.prompt > PAGE + self.cache.snapshots.lag

    def _borders(self, step: RowStep, table: BlockTable) -> Iterator[tuple[int, bool]]:
        """Page borders whose snapshots the step takes, and whether they are behind the prompt."""
        snapshots = self.cache.snapshots
        before, last = (table.length + snapshots.lag) // PAGE, (step.end + snapshots.lag) // PAGE
        if before == last or not snapshots.slots:
            return
        end = (step.row.prompt - 1) // PAGE
        interval = self.interval(step.row.prompt) // PAGE
        for page in range(before + 1, min(last, end) + 1):
            if page == end or page * PAGE == table.branch or page % interval == 0:
                yield page * PAGE, False
        if last > end:
            yield last * PAGE, True

    def interval(self, prompt: int) -> int:
        """Tokens between the snapshots of a prompt of so many tokens."""
        interval, most = LEAST_INTERVAL, max(1, len(self.cache.snapshots.slots) // SHARE)
        while prompt > most * interval:
            interval *= 2
        return interval
