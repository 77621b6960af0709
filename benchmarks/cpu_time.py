"""CPU time of other processes: wall time is no measure where neighbours take part of the processors."""

from __future__ import annotations

import os
from pathlib import Path

PER_SECOND = os.sysconf("SC_CLK_TCK")


def process_seconds(pid: int) -> float:
    """Of a process and its descendants, and of those that have ended and been waited for."""
    stats = [found for path in Path("/proc").glob("[0-9]*/stat") if (found := _fields(path))]
    parents = {int(found[0]): int(found[2]) for found in stats}
    family = {pid}
    while more := {child for child, parent in parents.items() if parent in family} - family:
        family |= more
    return sum(sum(map(int, found[12:16])) for found in stats if int(found[0]) in family) / PER_SECOND


def first_thread_seconds(pid: int) -> float:
    """Of the thread in which a process began, which holds the event loop of a server."""
    found = _fields(Path(f"/proc/{pid}/task/{pid}/stat"))
    return sum(map(int, found[12:14])) / PER_SECOND


def _fields(path: Path) -> list[str]:
    """Fields of proc(5), pid, state, ppid, …, without the name of the command; empty if it has ended."""
    try:
        pid, rest = path.read_text().split(" ", 1)
    except OSError:
        return []
    return [pid, *rest.rpartition(")")[2].split()]
