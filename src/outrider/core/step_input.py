"""Input of one forward as flat arrays: tokens, positions, cache slots, and the visible keys of each row.

A row is one token of the ragged batch.  It attends to the first `context_lens` slots of its request's slot
table, then to the slots of its own path.  These are the keys of positions 0, 1, 2, … in that order.  Known
tokens and chains have an empty path.  The path of a tree node is its ancestors and itself.

        slot table of the request  0 1 2 3 4 5 6 │ node slots
        known token at 6           ■ ■ ■ ■ ■ ■ ■ │               context 7, path ()
        node 2, child of node 0    ■ ■ ■ ■ ■ ■ ■ │ ■ · ■         context 7, path (node 0, node 2)
                                                                 position 7 + 2 - 1 = 8

Paths are slots, not bit masks over the rows of the step.  When a draft tree grows level by level, earlier
forwards have computed the ancestors of a node, so they are not rows of this one.

A *view* is a slot table that omits some of a request's slots.  Its first `pinned` entries are the first of
the request.  The text position of each other entry is its index in the view plus `shift`.  Positions are
always those of the text: rotations, sliding windows and ALiBi slopes follow them.  All views of a step have
the same `pinned`.

        view, pinned 2, shift 3    0 1 · · · 5 6 │               context 4, known token at position 3 + 3 = 6
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, fields
from itertools import chain
from operator import add
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from outrider.core.device import to_device
from outrider.core.recurrent import RecurrentRows

T = TypeVar("T")
NO_PATHS = array("i")


class AdapterRows(NamedTuple):
    """Neighbouring rows that use one LoRA adapter."""

    first: int
    num_rows: int
    adapter: Any


class StepTensors(NamedTuple):
    """The arrays of a step on a device, int64 [N]."""

    input_ids: Tensor
    positions: Tensor
    slot_mapping: Tensor


@dataclass(eq=False, slots=True)
class StepInput:
    """N rows of B requests, added in order; `build` makes the arrays.  The rows of a request are neighbours.

    input_ids, positions, slot_mapping: [N]; slot_mapping is the slot for the K/V of a row
    context_lens, path_lens:            [N]
    columns:                            int64 [5, N], these five one after the other
    path_slots:                         int32 [N, max_path_len], row by row, 0 after the end of a path
    query_start:                        [B + 1], first row of every request, then N
    slot_tables:                        [B], int32, the slot of each position, or of each entry of a view
    max_seq_len:                        largest number of keys of a row
    shifted:                            whether a row is of a view with a shift
    adapters:                           the rows that use a LoRA adapter, ascending
    device_ids:                         int64 [N] or None: ids that only a device knows, in place of input_ids
    device_paths:                       int32 [N, max_path_len] or None: slots, as `path_slots`, that only a
                                        device knows; then every row has a path of that length
    logits_rows:                        [M], ascending: rows whose logits are computed
    recurrent:                          for recurrent layers.  None: the states of request r are in slot r,
                                        and draft nodes are the rows with a path

    Rows are added to lists, from which `build` makes `columns` and `path_slots`.  These are `array` objects:
    with cold CPU caches after a forward, a numpy or torch call takes tens of microseconds.  `on` creates the
    tensors lazily, once per device.
    """

    pinned: int = 0
    length: int = 0
    max_seq_len: int = 0
    max_path_len: int = 0
    shifted: bool = False
    input_ids: list[int] = field(default_factory=list)
    device_ids: Tensor | None = None
    device_paths: Tensor | None = None
    positions: list[int] = field(default_factory=list)
    slot_mapping: list[int] = field(default_factory=list)
    context_lens: list[int] = field(default_factory=list)
    path_lens: list[int] = field(default_factory=list)
    columns: array[int] = field(init=False, repr=False)  # this and the next are made by `build`
    path_slots: array[int] = field(init=False, repr=False)
    slot_tables: list[array[int]] = field(default_factory=list)
    query_start: list[int] = field(default_factory=[0].copy)
    adapters: list[AdapterRows] = field(default_factory=list)
    logits_rows: list[int] = field(default_factory=list)
    recurrent: RecurrentRows | None = None
    _paths: list[Sequence[int]] = field(default_factory=list)
    _derived: dict[object, Any] = field(default_factory=dict)

    def __getstate__(self) -> tuple[None, dict[str, Any]]:
        """What another process needs: slot tables as far as they are read, nothing that a backend derived."""
        kept = {part.name: getattr(self, part.name) for part in fields(self)}
        kept["slot_tables"] = [table[: self.max_seq_len] for table in self.slot_tables]
        return None, {**kept, "_derived": {}}

    @staticmethod
    def of_chain(table: array[int], start: int, tokens: Sequence[int]) -> StepInput:
        """A built step of one request: tokens at positions start, start + 1, …, in slots of `table`."""
        step_input = StepInput()
        step_input.chain(table, start, tokens)
        return step_input.build()

    @staticmethod
    def of_ids(ids: Sequence[int]) -> StepInput:
        """A built step of a text from its beginning, in the slots 0, 1, ….  Also for embeddings alone."""
        return StepInput.of_chain(array("i", range(len(ids))), 0, ids)

    # ---- adding rows

    def chain(self, table: array[int], start: int, tokens: Sequence[int], shift: int = 0) -> None:
        """Add tokens at positions start, start + 1, … of the request with slots `table`.

        shift: that of the view, if `table` is one.
        """
        n = len(tokens)
        end = start + n
        self._add(table, n, end)
        self.shifted |= shift != 0
        self.input_ids += tokens
        self.positions += range(start + shift, end + shift)
        self.slot_mapping += table[start:end]
        self.context_lens += range(start + 1, end + 1)
        self._paths += [()] * n

    def token(self, table: array[int], position: int, token: int) -> None:
        """Add one token of the request with slots `table`: `chain` without its slices, for plain decoding."""
        self._add(table, 1, position + 1)
        self.input_ids.append(token)
        self.positions.append(position)
        self.slot_mapping.append(table[position])
        self.context_lens.append(position + 1)
        self._paths.append(())

    def tokens(self, tables: Sequence[array[int]], positions: Sequence[int]) -> None:
        """Add one token, of id 0, of each of several requests with these tables: `token` for all of them."""
        n = len(tables)
        self.slot_tables += tables
        self.query_start += range(self.length + 1, self.length + n + 1)
        self.length += n
        self.input_ids += [0] * n
        self.positions += positions
        self.slot_mapping += [table[position] for table, position in zip(tables, positions)]
        self.context_lens += [position + 1 for position in positions]
        self.max_seq_len = max(self.max_seq_len, *self.context_lens[-n:])
        self._paths += [()] * n

    def node(self, table: array[int], context: int, path: Sequence[int], token: int, shift: int = 0) -> None:
        """Add one tree node.

        It attends to `context` slots of the table, then `path`; its own slot is the last.
        """
        self.nodes(table, context, [path], [token], shift)

    def nodes(
        self,
        table: array[int],
        context: int,
        paths: Sequence[Sequence[int]],
        tokens: Sequence[int],
        shift: int = 0,
    ) -> None:
        """Add nodes of one tree, each with its own path, as `node` adds one."""
        n, depths, root = len(paths), [*map(len, paths)], context - 1 + shift
        deepest = max(depths)
        self.max_path_len = max(self.max_path_len, deepest)
        self.shifted |= shift != 0
        self._add(table, n, context + deepest)
        self.input_ids += tokens
        self.positions += [root + depth for depth in depths]
        self.slot_mapping += [path[-1] for path in paths]
        self.context_lens += [context] * n
        self._paths += paths

    def block(self, table: array[int], context: int, slots: Sequence[int], tokens: Sequence[int]) -> None:
        """Add tokens at positions context, context + 1, …

        Each attends to `context` slots, then the whole block.
        """
        first, n = self.length, len(tokens)
        self.nodes(table, context, [slots] * n, tokens)
        self.positions[first:], self.slot_mapping[first:] = range(context, context + n), slots

    def adapt(self, first: int, adapter: Any) -> None:
        """Mark the rows from `first` on as rows of a request with `adapter`."""
        if self.adapters:
            last = self.adapters[-1]
            if last.adapter is adapter and last.first + last.num_rows == first:
                first = self.adapters.pop().first
        self.adapters.append(AdapterRows(first, self.length - first, adapter))

    def _add(self, table: array[int], n: int, keys: int) -> None:
        """Count n rows of a request, which see at most `keys` keys."""
        if not self.slot_tables or self.slot_tables[-1] is not table:
            self.slot_tables.append(table)
            self.query_start.append(self.length)
        self.length += n
        self.query_start[-1] = self.length
        if keys > self.max_seq_len:
            self.max_seq_len = keys

    def only(self, rows: Sequence[int]) -> StepInput:
        """Some of the rows, ascending, as a built step.

        Rows attend to earlier rows only, so parts may run one after another.  Rows of `block` do not.
        """
        part = StepInput(self.pinned, len(rows), shifted=self.shifted)
        for name in ("input_ids", "positions", "slot_mapping", "context_lens", "_paths"):
            column = getattr(self, name)
            setattr(part, name, [column[i] for i in rows])
        lengths = [*map(len, part._paths)]
        part.max_path_len, part.max_seq_len = max(lengths), max(map(add, part.context_lens, lengths))
        for table, end in zip(self.slot_tables, self.query_start[1:]):
            if (stop := bisect_left(rows, end)) > part.query_start[-1]:
                part.slot_tables.append(table)
                part.query_start.append(stop)
        place = {row: at for at, row in enumerate(rows)}
        part.logits_rows = [place[row] for row in self.logits_rows if row in place]
        for first, count, adapter in self.adapters:
            low, high = bisect_left(rows, first), bisect_left(rows, first + count)
            if high > low:
                part.adapters.append(AdapterRows(low, high - low, adapter))
        return part.build()

    def split(self, ends: Sequence[int], count: int) -> tuple[list[int], list[int], list[int]]:
        """Rows that can run first, the others, both ascending, and the places of `ends` among the latter.

        ends: last rows of requests, whose last `count` rows are among the latter.
        """
        late = set[int]()
        for end in ends:
            request = bisect_right(self.query_start, end) - 1
            assert end + 1 == self.query_start[request + 1], "earlier rows would miss the keys of later ones"
            late.update(range(max(self.query_start[request], end + 1 - count), end + 1))
        early, rest = [row for row in range(self.length) if row not in late], sorted(late)
        return early, rest, [bisect_left(rest, end) for end in ends]

    # ---- reading a built step

    def build(self) -> StepInput:
        """Complete the arrays.  No row may be added afterwards."""
        self.path_lens = [*map(len, self._paths)] if self.max_path_len else [0] * self.length
        self.columns = array(
            "q", [*self.input_ids, *self.positions, *self.slot_mapping, *self.context_lens, *self.path_lens]
        )
        self.path_slots = array("i", self._padded_paths()) if self.max_path_len else NO_PATHS
        return self

    def _padded_paths(self) -> Iterable[int]:
        if min(self.path_lens) == self.max_path_len:  # a level of a tree
            return chain.from_iterable(self._paths)
        flat, blank = list[int](), [0] * self.max_path_len
        for path, length in zip(self._paths, self.path_lens):
            flat += path
            flat += blank[length:]
        return flat

    def put(self, ids: Tensor, paths: Tensor | None = None) -> None:
        """Set the ids [N] and the paths [N, max_path_len] of a built step that only a device knows.

        To be called before any use of the step.  A step that has tensors for them, as in a graph, keeps
        these and gets their contents.
        """
        if self.device_ids is None:
            self.device_ids, self.device_paths = ids, paths
            return
        self.device_ids.copy_(ids)
        if paths is not None:
            assert self.device_paths is not None
            self.device_paths[:, : paths.shape[1]].copy_(paths)

    def translate(self, ids: Sequence[int]) -> None:
        """Replace every id of a built step by ids[id]."""
        self.input_ids = [ids[i] for i in self.input_ids]
        self.columns[: self.length] = array("q", self.input_ids)
        self._derived.clear()

    def key_slots(self, row: int, first: int = 0) -> list[int]:
        """Slots of the keys that a row sees, in the order of their positions, from key `first` on."""
        request = next(i for i, end in enumerate(self.query_start[1:]) if row < end)
        slots = self.slot_tables[request][first : self.context_lens[row]].tolist()
        return [*slots, *self._paths[row][max(0, first - self.context_lens[row]) :]]

    def node_path(self, row: int) -> Sequence[int]:
        """Slots of a tree node's ancestors and its own; empty for a known token and in a chain."""
        return self._paths[row]

    def key_shift(self, row: int) -> int:
        """Shift of the keys after the pinned ones.  0 in a block, whose rows attend to later keys."""
        return max(0, self.positions[row] + 1 - self.context_lens[row] - self.path_lens[row])

    def on(self, device: torch.device) -> StepTensors:
        """The arrays as tensors on a device."""
        return self.derived(device, lambda step: step._tensors(device))

    def derived(self, key: object, make: Callable[[StepInput], T]) -> T:
        """Value of `make` for a built step, memoized under `key` and shared by all layers."""
        if key not in self._derived:
            self._derived[key] = make(self)
        made: T = self._derived[key]
        return made

    def _tensors(self, device: torch.device) -> StepTensors:
        columns = torch.frombuffer(self.columns, dtype=torch.int64).view(-1, self.length)
        ids, positions, slots = to_device(columns[:3], device)
        return StepTensors(ids if self.device_ids is None else self.device_ids.to(device), positions, slots)
