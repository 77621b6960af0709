"""Page allocator with a prefix index.

A page is `PAGE` consecutive slots.  The block table of a sequence maps position p to slot table.slots[p].
The draft nodes of a step take the positions after the last known token.

A full page is indexed by (the page before it, its tokens) and may be shared; `owners` counts the sequences
that use it.  A page without owners stays indexed until LRU eviction.

A table of a model with recurrent layers has a state slot.  It shares pages up to one with a snapshot of the
state after them (`snapshots.py`).
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Hashable, Sequence

from outrider.cache.pool import Pool
from outrider.cache.snapshots import Snapshots
from outrider.core.block_table import NO_STATE, PAGE, ROOT, BlockTable

Key = tuple[Hashable, tuple[int, ...]]  # of an indexed page: the node or root before it, its tokens


class Cache:
    """Allocator of `pages` pages.  Touches no tensor, except that `fork` copies a page in every pool.

    states: number of state slots of a model with recurrent layers; every table has one of them
    snapshots: of the states; tables with a state share no pages without any
    """

    def __init__(
        self,
        pages: int,
        capacity: int,
        prefix_caching: bool = True,
        states: int = 0,
        snapshots: Snapshots | None = None,
    ) -> None:
        self.pages, self.capacity = pages, capacity
        self.snapshots = snapshots or Snapshots()
        self.prefix_caching = prefix_caching and not (states and not self.snapshots.slots)
        self.states, self.free_states = states, [*reversed(range(states))]
        self.pools: list[Pool] = []
        self.free = [*reversed(range(pages))]  # a stack: fresh pages come out in ascending order
        self.owners = [0] * pages
        self.tables: set[BlockTable] = set()
        self.index: dict[Key, tuple[int, int]] = {}  # -> node and page
        self.entry: dict[int, Key] = {}  # page -> its key in the index
        self.idle: OrderedDict[int, None] = OrderedDict()  # indexed pages without owners, oldest first
        self.last_node = ROOT

    @property
    def available(self) -> int:
        """Pages that no sequence holds."""
        return len(self.free) + len(self.idle)

    def open(self, root: Hashable = ROOT) -> BlockTable:
        """Create an empty table.  It shares pages with tables of the same root only.

        root: not a positive int, as the nodes of the index are.
        """
        table = BlockTable(array("i", bytes(4 * self.capacity)), root=root)
        if self.states:
            table.state = self.free_states.pop()
        self.tables.add(table)
        return table

    def reserve(self, table: BlockTable, length: int) -> bool:
        """Grow `table` to `length` positions.  Returns False, without effect, if there are too few pages."""
        if length <= table.room:
            return True
        need = -(-(length - table.room) // PAGE)
        if need > self.available:
            return False
        for _ in range(need):
            self._append(table, self._take())
        return True

    def shrink(self, table: BlockTable, length: int) -> None:
        """Free the pages past `length` positions."""
        while table.room - length >= PAGE:
            self._drop(table.pages.pop())
            table.room -= PAGE
        assert len(table.nodes) <= len(table.pages), "an indexed page was cut off"

    def close(self, table: BlockTable) -> None:
        """Free all pages, the last ones first, so that a prefix is evicted after its continuation."""
        for page in reversed(table.pages):
            self._drop(page)
        table.pages.clear()
        table.room = 0
        if table.state != NO_STATE:
            self.free_states.append(table.state)
            table.state = NO_STATE
            self.snapshots.close(table)
        self.tables.discard(table)

    def match(self, table: BlockTable, tokens: Sequence[int], limit: int) -> int:
        """Share the longest indexed prefix, at most `limit` tokens, with an empty table.

        Of a table with a state, it ends with a snapshot: call `use_snapshot` once the table has all its room.
        Returns its length.
        """
        pages, nodes = list[int](), list[int]()
        while self.prefix_caching and (len(nodes) + 1) * PAGE <= limit:
            found = self.index.get(table.key_after(nodes, tokens))
            if found is None:
                break
            nodes.append(found[0])
            pages.append(found[1])
        if self.states:
            pages = self._resume(table, pages)
        for page, node in zip(pages, nodes):
            self._share(table, page)
            table.nodes.append(node)
        return table.room

    def _resume(self, table: BlockTable, pages: list[int]) -> list[int]:
        """The indexed pages up to the last one with a snapshot, with which `table` begins."""
        snapshots, end = self.snapshots, len(pages)
        while end and (pages[end - 1] not in snapshots.of_page or end * PAGE <= snapshots.lag):
            end -= 1
        if end < len(pages):
            table.branch = len(pages) * PAGE
        if end:
            table.resumed = snapshots.slot_of(pages[end - 1])
            table.length = end * PAGE - snapshots.lag
        return pages[:end]

    def use_snapshot(self, table: BlockTable) -> None:
        """Note the use of the snapshot that an admitted table has matched, behind its shared pages."""
        if table.resumed != NO_STATE:
            self.snapshots.use(table.pages[len(table.nodes) - 1])

    def register(self, table: BlockTable, tokens: Sequence[int], filled: int) -> None:
        """Index the full pages among the first `filled` positions, which every pool has written."""
        while self.prefix_caching and (len(table.nodes) + 1) * PAGE <= filled:
            page = table.pages[len(table.nodes)]
            # another table that holds the page may be first
            key = self.entry.get(page) or table.key_after(table.nodes, tokens)
            if key not in self.index:
                self.last_node += 1
                self.index[key] = (self.last_node, page)
                self.entry[page] = key
            table.nodes.append(self.index[key][0])  # possibly of an equal page that was indexed earlier
        if table.pending:
            self.attach(table, tokens)

    def attach(self, table: BlockTable, tokens: Sequence[int]) -> None:
        """Give the pending snapshots of a table to their pages, as far as these are indexed."""
        for border in [*table.pending]:
            count = border // PAGE
            if count <= len(table.nodes):
                slot, page = table.pending.pop(border), table.pages[count - 1]
                key = self.entry.get(page) or table.key_after(table.nodes[: count - 1], tokens)
                found = self.index.get(key)
                if found is not None and found[0] == table.nodes[count - 1]:
                    self.snapshots.attach(slot, found[1])
                else:
                    self.snapshots.free_slot(slot)  # the page of another table, which was evicted

    def fork(self, source: BlockTable, target: BlockTable, length: int) -> bool:
        """Give `target` (empty) the first `length` positions of `source`: share full pages, copy the rest."""
        full, rest = divmod(length, PAGE)
        if rest and not self.available:
            return False
        for page in source.pages[:full]:
            self._share(target, page)
        target.nodes = source.nodes[:full]
        if rest:
            self._append(target, self._take())
            first, last = full * PAGE, length
            for pool in self.pools:
                pool.move(source.slots[first:last], target.slots[first:last])
        return True

    def forget(self) -> None:
        """Empty the prefix index.  Sequences keep their pages."""
        self.free.extend(self.idle)
        self.idle.clear()
        self.index.clear()
        self.entry.clear()
        self.snapshots.forget()

    def clear(self) -> None:
        """Free every page of every table, and empty the prefix index."""
        for table in self.tables:
            table.pages.clear()
            table.nodes.clear()
            table.room, table.state = 0, NO_STATE
            table.pending.clear()
        self.tables.clear()
        self.idle.clear()
        self.index.clear()
        self.entry.clear()
        self.free = [*reversed(range(self.pages))]
        self.free_states = [*reversed(range(self.states))]
        self.snapshots.clear()
        self.owners = [0] * self.pages

    def check(self) -> None:
        """Assert that every page is either free, or idle, or owned as often as tables hold it."""
        held = [0] * self.pages
        for table in self.tables:
            assert table.room == len(table.pages) * PAGE, "the room is not that of the pages"
            for i, page in enumerate(table.pages):
                held[page] += 1
                assert table.slots[i * PAGE : (i + 1) * PAGE] == _slots(page), (
                    f"slots of page {page} are wrong"
                )
        states = sorted([*self.free_states, *[table.state for table in self.tables if self.states]])
        assert states == [*range(self.states)], "a state slot is lost, or held twice"
        self.snapshots.check(self.tables, self.entry)
        assert held == self.owners, "owner counts do not match the tables"
        free, idle = set(self.free), set(self.idle)
        assert len(free) == len(self.free), "a page is free twice"
        for page in range(self.pages):
            places = (page in free) + (page in idle) + (held[page] > 0)
            assert places == 1, f"page {page} is in {places} places"
        assert idle <= self.entry.keys(), "an idle page is not in the index"
        assert not free & self.entry.keys(), "a free page is in the index"
        assert all(self.index[key][1] == page for page, key in self.entry.items()), (
            "the index points elsewhere"
        )
        assert len(self.index) == len(self.entry), "an index entry has no page"

    def _take(self) -> int:
        if self.free:
            return self.free.pop()
        page, _ = self.idle.popitem(last=False)
        # entries after it cannot be reached now, and are evicted in LRU order
        del self.index[self.entry.pop(page)]
        self.snapshots.drop(page)
        return page

    def _append(self, table: BlockTable, page: int) -> None:
        at = table.room
        table.slots[at : at + PAGE] = _slots(page)
        table.pages.append(page)
        table.room += PAGE
        self.owners[page] += 1

    def _share(self, table: BlockTable, page: int) -> None:
        self.idle.pop(page, None)
        self._append(table, page)

    def _drop(self, page: int) -> None:
        self.owners[page] -= 1
        if self.owners[page] == 0:
            if page in self.entry:
                self.idle[page] = None
            else:
                self.free.append(page)


def _slots(page: int) -> array[int]:
    return array("i", range(page * PAGE, (page + 1) * PAGE))
