"""What a step costs: the target's forward by its rows, and drafting by drafter and depth.

    step seconds = pace(batch) * (forward(rows) + per_context * context + draft(drafter, depth))

- forward(rows) is a table over `ROWS`, learned while serving, interpolated in between.
- pace(batch) is the present speed of the machine for a batch of that many requests.  A slow minute changes
  the pace, not the table, so it slows plain and speculative steps alike and switches nothing.
- The table is measured without what each request takes beside the forward, such as its attention, sampling
  and output.  Rows beyond one a request take less: `further_row(batch)` of the pace, at first what is in the
  table.
- One step moves an estimate by little: surprises are clipped.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Collection, Mapping
from itertools import pairwise
from typing import NamedTuple

from outrider.control.line_cost import LineCost

# rows of a forward in the table
ROWS = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 24, 32, 48, 64, 96, 128, 192, 256)
PRIOR_ROW = 0.05  # cost of a further row over that of the first, before anything is measured
PRIOR_LEVEL = 0.04  # cost of a drafted level over a plain step, before the drafter was ever asked
PRIOR_FIXED = 0.5  # part of a draft's cost that its depth does not change, before two depths were asked for
PACE_RATE = 0.1
RATE = 0.05  # of the moving averages of tokens per second, and of the time that idle drafters take
OUTLIER = 3.0  # drafting that takes longer than so many times its expected seconds is cut, in the ledger
FIRST_RATE, LAST_RATE = 0.5, 0.03  # of a table entry: at its first observation, and after many
# Of what further rows take: parts between are told from noise; and the part of a surprise that they learn.
LEAST_FURTHER, MOST_FURTHER, FURTHER_RATE = 0.5, 0.85, 0.1
GROWTH = 2  # rows of a forward over the most that were seen before
CLIP, NEW = 0.25, 3  # largest surprise of a step, as a logarithm: more for the first ones of an entry


class ForwardCost:
    """Seconds of a step without its drafting.

    measured: rows -> seconds, at no context.  per_context: seconds for each pair of a row and a position that
    it attends to.
    """

    def __init__(self, measured: Mapping[int, float] | None = None, per_context: float = 0.0) -> None:
        self.per_context = per_context
        self.cells = [_on_line(measured or {1: 1e-3}, rows) for rows in ROWS]
        most = max(measured, default=0) if measured else 0
        self.counts = [NEW + 1 if rows <= most else 0 for rows in ROWS]
        self.measured = len(measured or ()) > 1
        self.paces: dict[int, float] = {}
        self.further_rows: dict[int, float] = {}
        self.plain_steps: Counter[int] = Counter()  # by batch
        self.rates: dict[int, tuple[float, float]] = {}  # batch -> moving averages of tokens and seconds
        self.jumps = 0  # direction of the last plain step, if it was far off
        self.steps = 0
        self.trusted = 0  # most rows whose cost can be told
        self._fill()

    def _fill(self) -> None:
        """The table for every number of rows, increasing.  Entries that were never seen follow the others."""
        if any(self.counts) and not all(self.counts):
            seen = {rows: cell for rows, cell, count in zip(ROWS, self.cells, self.counts) if count}
            self.cells = [_on_line(seen, rows) for rows in ROWS]
        self.trusted = GROWTH * max([rows for rows, count in zip(ROWS, self.counts) if count], default=1)
        self.table, most = [0.0], 0.0
        for (first, low), (last, high) in pairwise(zip((0, *ROWS), (self.cells[0], *self.cells))):
            slope = (high - low) / (last - first)
            for rows in range(first + 1, last + 1):
                most = max(most, high - (last - rows) * slope)
                self.table.append(most)
        self.slope = (self.table[-1] - self.table[ROWS[-1] // 2]) / (ROWS[-1] - ROWS[-1] // 2)

    def pace(self, batch: int) -> float:
        """Speed of the machine for a batch of so many requests; that of the nearest batch if it is new."""
        if batch in self.paces:
            return self.paces[batch]
        nearest = min(self.paces, key=lambda other: abs(other - batch), default=None)
        return 1.0 if nearest is None else self.paces[nearest]

    def plain_near(self, batch: int) -> int:
        """Steps without drafts that were seen of so many requests, or of at most a quarter more or less."""
        near = [n for other, n in self.plain_steps.items() if 4 * abs(other - batch) <= batch]
        return max(near, default=0)

    def further_row(self, batch: int) -> float:
        """What a row beyond one a request takes, as a part of the table at the pace of so many requests."""
        return self.further_rows.get(batch, 1.0)

    def base(self, rows: int, context: int = 0) -> float:
        """Seconds at pace 1 of a forward over so many rows, which attend to `context` positions together."""
        last = len(self.table) - 1
        seconds = self.table[rows] if rows <= last else self.table[last] + (rows - last) * self.slope
        return seconds + self.per_context * context

    def bases(self, rows: int, count: int) -> list[float]:
        """`base` of so many numbers of rows from this one on, without context."""
        last = len(self.table) - 1
        found = self.table[rows : rows + count]
        beyond = range(max(rows, last + 1), rows + count)
        return found + [self.table[last] + (n - last) * self.slope for n in beyond]

    def growing(self, batch: int) -> float:
        """Part of a step of so many requests that is taken for each of them, 0 to 1."""
        if batch < 2:
            return 1.0
        alone, together = (self.pace(n) * self.base(n) for n in (1, batch))
        return min(1.0, max(0.0, (together - alone) / (batch - 1) * batch / together))

    def rate(self, batch: int) -> float:
        """Tokens per second of the last steps with so many requests; 0 before the first."""
        tokens, seconds = self.rates.get(batch, (0.0, 1.0))
        return tokens / seconds

    def learn_rate(self, batch: int, emitted: float, seconds: float, steps: int = 1) -> None:
        """Take in so many steps: tokens and seconds of each."""
        tokens, time = self.rates.get(batch, (emitted, seconds))
        rate = 1 - (1 - RATE) ** steps
        self.rates[batch] = (tokens + rate * (emitted - tokens), time + rate * (seconds - time))

    def learn_plain(self, batch: int, rows: int, context: int, seconds: float, steps: int = 1) -> None:
        """Take in steps without drafts, by their median: they give the pace.  A jump needs two in a row.

        Of the first ones the shortest counts: some found no weights in the caches of the processor.
        """
        ratio = seconds / self.base(rows, context)
        deviation = math.log(max(ratio, 1e-12) / self.pace(batch))
        first = not self.plain_steps[batch]
        self.plain_steps[batch] += steps
        if first or (deviation < 0 and self.plain_steps[batch] <= NEW):
            self.paces[batch] = ratio
            self.counts[_nearest(rows)] |= first and rows in ROWS
            self.further_rows.pop(batch, None)
            if self.measured and ratio > 1 / MOST_FURTHER:
                self.further_rows[batch] = max(LEAST_FURTHER, 1 / ratio)
        elif abs(deviation) < CLIP:
            rate = max(1 - (1 - PACE_RATE) ** steps, steps / self.plain_steps[batch])
            self.paces[batch] = self.pace(batch) * math.exp(rate * deviation)
            self.jumps = 0
        elif steps > 2 or self.jumps * deviation > 0:
            self.paces[batch], self.jumps = ratio, 0
        else:
            self.jumps = 1 if deviation > 0 else -1

    def settled(self, rows: int) -> bool:
        """Whether the cost of so many rows was measured, so that another one would be an outlier."""
        return self.counts[_nearest(rows)] > NEW

    def learn_drafting(self, batch: int, rows: int, context: int, seconds: float) -> float:
        """Take in a step with drafts: it gives the cost of its rows.  Returns the logarithmic surprise."""
        part, alone, together = self.further_row(batch), self.base(batch), self.base(rows, context)
        expected = self.pace(batch) * (alone + part * (together - alone))
        surprise = math.log(max(seconds, 1e-12) / expected)
        if batch in self.further_rows:
            learned = part * math.exp(FURTHER_RATE * max(-CLIP, min(CLIP, surprise)))
            self.further_rows[batch] = min(1.0, max(LEAST_FURTHER, learned))
        if rows <= ROWS[-1]:
            self._learn_cell(_nearest(rows), surprise)
        return surprise

    def _learn_cell(self, i: int, surprise: float) -> None:
        clip = CLIP if self.counts[i] > NEW else NEW * CLIP
        surprise = max(-clip, min(clip, surprise))
        self.steps += 1
        self.counts[i] += 1
        factor = math.exp(max(LAST_RATE, FIRST_RATE / self.counts[i]) * surprise)
        self.cells[i] *= factor
        if self.counts[i] < 16 or self.steps % 32 == 0:
            self._fill()


def _nearest(rows: int) -> int:
    """The entry of `ROWS` next to so many rows."""
    i = min(bisect_left(ROWS, rows), len(ROWS) - 1)
    return i if ROWS[i] == rows or ROWS[i] - rows <= rows - ROWS[i - 1] else i - 1


def _prior(rows: int) -> float:
    """Cost of a forward over so many rows, over that of one row, as far as nothing is known."""
    return 1 + PRIOR_ROW * (rows - 1)


def _on_line(known: Mapping[int, float], rows: int) -> float:
    """Seconds for so many rows, on the line through its neighbours, or through the last two."""
    places = sorted(known)
    i = bisect_left(places, rows)
    if i == 0 or len(places) == 1:
        return known[places[0]] * _prior(rows) / _prior(places[0])
    below, above = places[i - 1 : i + 1] if i < len(places) else places[-2:]
    slope = (known[above] - known[below]) / (above - below)
    return max(known[below] + (rows - below) * slope, known[places[0]])


class Ask(NamedTuple):
    """Rows that ask a drafter together, and the mean depth of what they ask for."""

    rows: int
    depth: float


class DraftCost:
    """Seconds of asking each drafter, at pace 1: lines over the depth, by asking rows.

    plain: of a step.  by_level: drafters that are expected to take as much longer as there are more levels,
    before two depths have shown what these cost; all others, half as much.
    """

    def __init__(self, plain: float, by_level: Collection[int] = ()) -> None:
        self.plain, self.by_level = plain, by_level
        self.lines: dict[tuple[int, int], tuple[LineCost, float, float]] = {}  # cost, fixed, per level

    def known(self, drafter: int) -> bool:
        """Whether it was ever asked."""
        return any(k == drafter for k, _ in self.lines)

    def line(self, drafter: int, rows: int) -> tuple[float, float]:
        """(fixed, per level) in seconds for so many rows that ask together."""
        found = self.lines.get((drafter, _bucket(rows)))
        if found is None:
            others = [key for key in self.lines if key[0] == drafter]
            if not others:
                return 0.0, PRIOR_LEVEL * self.plain
            found = self.lines[min(others, key=lambda key: abs(key[1] - _bucket(rows)))]
        return found[1], found[2]

    def learn(self, drafter: int, rows: int, depth: float, seconds: float) -> None:
        """Take in asks of so many rows: their mean depth, and their mean seconds at pace 1."""
        key = drafter, _bucket(rows)
        old = self.lines[key][0] if key in self.lines else LineCost()
        self.set_line(*key, old.after(max(1, round(depth)), seconds, 0.0))

    def set_line(self, drafter: int, bucket: int, cost: LineCost) -> None:
        """Set the line of so many rows."""
        fixed, per_level = cost.line()
        if cost.alike and drafter not in self.by_level:
            shared = PRIOR_FIXED * per_level * cost.tokens / cost.weight
            fixed, per_level = fixed + shared, (1 - PRIOR_FIXED) * per_level
        self.lines[drafter, bucket] = cost, fixed, per_level

    def expected(self, drafter: int, rows: int, depth: float) -> float:
        """Seconds of asks of so many rows and this mean depth, at pace 1."""
        fixed, per_level = self.line(drafter, rows)
        return fixed + per_level * depth

    def report(self, drafter: int, pace: float) -> dict[str, float]:
        """Milliseconds of asking for one row."""
        fixed, per_level = self.line(drafter, 1)
        return {"ms_fixed": 1e3 * pace * fixed, "ms_per_level": 1e3 * pace * per_level}


def _bucket(rows: int) -> int:
    return (rows - 1).bit_length()
