"""Tables of named rows for terminals of any width: a narrow one gets fewer columns, and names stay whole."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from rich.console import Console, ConsoleOptions
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

LONG_NAME = 40  # characters of a name, above which it is wrapped where the terminal is narrow
UNBOUNDED = 10_000  # columns


class Column(NamedTuple):
    """title: may have line breaks.  cells: one for each row, in rich's markup."""

    title: str
    cells: Sequence[str]


@dataclass(frozen=True)
class NamedRows:
    """A table whose first column has the rows' names, in plain text.

    If it is wider than the terminal, these are tried in turn: `narrower` instead, names longer than LONG_NAME
    on several lines, without the columns `expendable` (titles, the first one goes first), and several tables
    one below the other.
    """

    title: str
    names: Sequence[str]
    columns: Sequence[Column]
    expendable: Sequence[str] = ()
    narrower: NamedRows | None = None
    what: str = "method"

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Any]:
        def fits(table: Table) -> bool:
            wide = options.update(width=UNBOUNDED)
            return Measurement.get(console, wide, table).maximum <= options.max_width

        table = self._table(self.names, self.columns)
        if fits(table):
            yield table
        elif self.narrower is not None:
            yield self.narrower
        else:
            yield from self._narrowed(options.max_width, fits)

    def _narrowed(self, width: int, fits: Any) -> Iterator[Any]:
        names = [wrapped(name) for name in self.names]
        columns, dropped = [*self.columns], list[str]()
        for title in self.expendable:
            if fits(self._table(names, columns)):
                break
            columns = [column for column in columns if column.title != title]
            dropped.append(" ".join(title.replace("-\n", "").split()))
        while columns:
            count = len(columns)
            while count > 1 and not fits(self._table(names, columns[:count])):
                count -= 1
            yield self._table(names, columns[:count])
            columns = columns[count:]
            if columns:
                yield ""
        if dropped:
            yield Text(f"Not shown in {width} columns: {', '.join(dropped)}.", style="dim")

    def _table(self, names: Sequence[str], columns: Sequence[Column]) -> Table:
        made = Table(title=self.title or None, title_justify="left", title_style="bold", show_edge=False)
        made.add_column(self.what, overflow="fold")
        for column in columns:
            made.add_column(column.title, justify="right", no_wrap=True, overflow="fold")
        for i, name in enumerate(names):
            made.add_row(Text(name), *(column.cells[i] for column in columns))
        return made


def wrapped(name: str) -> str:
    """A long name on several lines, the further ones indented."""
    return textwrap.fill(name, LONG_NAME, subsequent_indent="  ", break_on_hyphens=False)
