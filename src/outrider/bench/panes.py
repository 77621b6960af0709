"""Two panes that replay recorded answers side by side, with draft tokens in the colour of their drafter.

An answer is recorded alone on the machine, token by token.  The replay shows both on one clock, so that a
pane is as far as its answer was at that time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from outrider.outputs import CompletionOutput

COLOURS = ("green", "cyan", "magenta", "yellow", "blue", "red")
FRAMES = 20  # a second
BORDER = 4  # columns of a pane that are not text


class Piece(NamedTuple):
    """One token: seconds after the request, its text, and the method that drafted it (None: the target)."""

    seconds: float
    text: str
    source: str | None


def pieces_of(answer: CompletionOutput, decode: Callable[[list[int]], str]) -> list[Piece]:
    """The tokens of a finished answer with their texts; a part of a character appears with its last token."""
    pieces, shown = [], ""
    for i, (seconds, source) in enumerate(zip(answer.token_times, answer.token_sources), start=1):
        text = decode(answer.token_ids[:i])
        if text.endswith("\ufffd"):
            text = shown
        pieces.append(Piece(seconds, text[len(shown) :], source))
        shown = text
    return pieces


def coloured(pieces: Sequence[Piece], palette: dict[str, str]) -> Text:
    """The text of an answer, each draft token in the colour of its method."""
    text = Text()
    for piece in pieces:
        text.append(piece.text, style="" if piece.source is None else f"bold {palette[piece.source]}")
    return text


def palette_of(pieces: Sequence[Piece]) -> dict[str, str]:
    """Method -> colour, in order of appearance."""
    sources = dict.fromkeys(piece.source for piece in pieces if piece.source is not None)
    return {source: COLOURS[i % len(COLOURS)] for i, source in enumerate(sources)}


def legend(palette: dict[str, str]) -> Text:
    """A line that names the colour of each method."""
    text = Text("drafted and accepted: ", style="dim")
    for source, colour in palette.items():
        text.append(f"■ {source}  ", style=f"bold {colour}")
    return text.append("the rest: the model itself", style="dim")


def lines_of(pieces: Sequence[Piece], console: Console) -> int:
    """Lines that an answer takes in one of two panes."""
    return len(Text("".join(piece.text for piece in pieces)).wrap(console, console.width // 2 - BORDER))


def frame(
    question: str, plain: Sequence[Piece], fast: Sequence[Piece], now: float, slow: float, lines: int
) -> Group:
    """Both panes, of so many lines, as of `now` seconds.

    slow: seconds of the replay for one of the recording.
    """
    palette, grid = palette_of(fast), Table.grid(expand=True)
    panes = []
    for name, pieces in (("plain decoding", plain), ("Outrider", fast)):
        done = [piece for piece in pieces if piece.seconds <= now]
        title = f"{name}: {len(done)} of {len(pieces)} tokens"
        panes.append(Panel(coloured(done, palette), title=title, title_align="left", height=lines + 2))
        grid.add_column(ratio=1)
    grid.add_row(*panes)
    speed = "" if slow <= 1 else f", shown {slow:.1f} times slower than it ran"
    clock = Text(f"{now:.2f} s{speed}   ", style="dim").append_text(legend(palette))
    return Group(Text(question, style="bold"), grid, clock)


def replay(
    question: str, plain: Sequence[Piece], fast: Sequence[Piece], console: Console, least: float = 4.0
) -> None:
    """Show both answers until the right one is done.  least: seconds of a replay, slowed down for it.

    Without a terminal: the question and the answer as text.
    """
    if not fast or not plain:
        return
    end = fast[-1].seconds
    slow = max(1.0, least / end)
    if not console.is_terminal:
        behind = sum(piece.seconds <= end for piece in plain)
        console.print(Text(question), Text("".join(piece.text for piece in fast)), sep="\n", soft_wrap=True)
        console.print(
            f"  {len(fast)} tokens in {end:.2f} s, when plain decoding had {behind}.", soft_wrap=True
        )
        return
    began, lines = time.monotonic(), lines_of(plain, console)
    with Live(console=console, refresh_per_second=FRAMES) as live:
        while (now := (time.monotonic() - began) / slow) < end:
            live.update(frame(question, plain, fast, now, slow, lines))
            time.sleep(1 / FRAMES)
        live.update(frame(question, plain, fast, end, slow, lines))
