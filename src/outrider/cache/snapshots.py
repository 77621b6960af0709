"""Snapshots of recurrent states at page borders, for requests that continue a cached prefix.

A snapshot is a state slot.  It is pending while its page is not in the prefix index.  Then it belongs to that
page, and is evicted with it.  Snapshots are also evicted alone, the least recently used one first.

    page          0       1       2       3
    K/V         ████████████████████████████ ▒▒▒     ▒ not indexed
    snapshots           s7              s9           a request that has pages 0 … 2 resumes after page 2

A table that decodes replaces its last snapshot by a later one, unless another request has used it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Sequence

from outrider.core.block_table import NO_STATE, BlockTable


class Snapshots:
    """Allocator of the state slots of snapshots.

    slots:       all of them
    lag:         tokens between the state and the border of its page, which a request computes again
    of_page:     indexed page -> slot, the least recently used one first
    replaceable: slot -> the decoding table that may replace it
    """

    def __init__(self, slots: Sequence[int] = (), lag: int = 0) -> None:
        self.slots, self.lag = slots, lag
        self.of_page: OrderedDict[int, int] = OrderedDict()
        self.clear()

    def clear(self) -> None:
        """Free all slots."""
        self.of_page.clear()
        self.free = [*reversed(self.slots)]
        self.replaceable: dict[int, BlockTable] = {}

    def add(self, table: BlockTable, border: int, decodes: bool) -> int:
        """A slot for the state of `table` at a border; NO_STATE if all slots are of pending snapshots.

        decodes: it replaces the last such snapshot of the table
        """
        if decodes and self.replaceable.get(table.latest) is table:
            self._release(table.latest, table)
        elif not self.free and self.of_page:
            self.drop(next(iter(self.of_page)))
        if not self.free:
            return NO_STATE
        slot = table.pending[border] = self.free.pop()
        if decodes:
            table.latest = slot
            self.replaceable[slot] = table
        return slot

    def attach(self, slot: int, page: int) -> None:
        """Give a snapshot, which is not pending any more, to an indexed page, unless that has one."""
        if page in self.of_page:
            self.free_slot(slot)
        else:
            self.of_page[page] = slot

    def slot_of(self, page: int) -> int:
        """The slot of a page with a snapshot."""
        return self.of_page[page]

    def use(self, page: int) -> None:
        """Note that a request resumes at the snapshot of a page: it is the most recently used one now."""
        self.of_page.move_to_end(page)
        self.replaceable.pop(self.of_page[page], None)

    def drop(self, page: int) -> None:
        """Free the snapshot of a page, if it has one."""
        if page in self.of_page:
            self.free_slot(self.of_page.pop(page))

    def forget(self) -> None:
        """Free the snapshots of all pages."""
        for page in [*self.of_page]:
            self.drop(page)

    def close(self, table: BlockTable) -> None:
        """Free the pending snapshots of a table.  Those of pages stay, and are not replaced any more."""
        for slot in table.pending.values():
            self.free_slot(slot)
        table.pending.clear()
        if self.replaceable.get(table.latest) is table:
            del self.replaceable[table.latest]

    def check(self, tables: Collection[BlockTable], indexed: Collection[int]) -> None:
        """Assert that every slot is free, pending in one table, or that of one indexed page."""
        pending = [slot for table in tables for slot in table.pending.values()]
        held = sorted([*self.free, *pending, *self.of_page.values()])
        assert held == [*self.slots], "a snapshot is lost, or held twice"
        assert all(page in indexed for page in self.of_page), "a page with a snapshot is not in the index"
        assert not self.replaceable.keys() & {*self.free}, "a free snapshot is to be replaced"
        assert all(table in tables for table in self.replaceable.values()), "a closed table has a snapshot"

    def free_slot(self, slot: int) -> None:
        """Free a slot that is neither pending nor of a page."""
        self.free.append(slot)
        self.replaceable.pop(slot, None)

    def _release(self, slot: int, table: BlockTable) -> None:
        """Free the last snapshot of a decoding table."""
        for border, pending in table.pending.items():
            if pending == slot:
                del table.pending[border]
                self.free_slot(slot)
                return
        self.drop(next(page for page, own in self.of_page.items() if own == slot))
