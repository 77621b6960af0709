"""What an accepted token is worth in a batch that empties, and what such a batch has really lost.

A plain step of n rows takes f + n * m seconds.  A request that ends a step sooner saves m; only the last one
of a batch saves f, too.  While others take the places of those that end, that may be any of them, and a token
is worth its share of a step, f / n + m.  In a batch that empties, the last ones are those whose drafts fail:
where drafts are accepted, requests end first, and leave f to the others.

    ahead = replaced + (1 - replaced) * (m * n + f * shared) / (m * n + f)

is the part of that share which an accepted token is worth.

    shared = (longest / steps - 1) / (rate - 1)

of a batch that has emptied: tokens of its longest answer over the steps of its last request, which is what
the batch has gained, over the mean gain of its rows.  replaced: how far others take the places, 0 to 1.

When a batch has emptied, its lengths tell what plain decoding would have taken.  What the ledger had credited
beyond it was never saved.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from outrider.control.cost import ForwardCost
from outrider.control.plan import Load
from outrider.core.row import Row
from outrider.core.step import Batch

SHARED = 0.8  # before any batch has emptied
RATE = 0.3  # of a batch that empties, in the moving mean of `shared`
FORGET = 0.05  # the same, where nothing was gained: what was seen need not hold any more
LEAST_GAIN = 0.2  # accepted tokens a step, in the mean, that tell something
REPLACED = 0.1  # of a request that ends, in the moving mean of `replaced`
YOUNGER = 0.75  # of the steps of a row that ends: others with fewer began later
HALF = 0.5  # part of the others that began later where all places are taken again
LEAST = 0.1  # part of its share that an accepted token is worth at least
APART = 0.3  # `replaced` below which requests begin together


@dataclass(slots=True)
class Tail:
    """Moving means over requests and batches that end.

    ended: requests since the batch was empty.  running: those that ran on when the last of them ended.
    """

    shared: float = SHARED
    replaced: float = 0.0
    ended: list[Row] = field(default_factory=list)
    running: set[Row] = field(default_factory=set)

    def ahead(self, rows: int, forward: ForwardCost) -> float:
        """Part of a plain token's share of a step that an accepted one is worth, with so many rows."""
        if rows < 2:
            return 1.0
        alone, together = forward.base(1), forward.base(rows)
        marginal = min(1.0, max(0.0, (together - alone) / (rows - 1) * rows / together))
        gained = marginal + (1 - marginal) * self.shared
        return max(LEAST, self.replaced + (1 - self.replaced) * gained)

    def learn(self, batch: Batch, load: Load) -> float:
        """Take in a step in which rows have ended, after their summaries are complete.

        Returns seconds that the ledger has credited too much, where the batch has emptied.
        """
        rows = batch.rows
        if self.running.isdisjoint(rows):  # they were aborted: this is another batch
            self.ended = []
        ended = [row for row in rows if row.finish_reason is not None]
        self.running = set(rows).difference(ended)
        self._replaced(rows, ended)
        if self.replaced >= APART:
            self.ended = []
            return 0.0
        self.ended += ended
        if self.running:
            return 0.0
        ended, self.ended = self.ended, []
        return self._emptied(ended, load) if len(ended) > 1 else 0.0

    def _replaced(self, rows: Sequence[Row], ended: Sequence[Row]) -> None:
        if len(rows) > 1:
            for row in ended:
                younger = sum([other.steps < YOUNGER * row.steps for other in rows]) / (len(rows) - 1)
                self.replaced += REPLACED * (min(1.0, younger / HALF) - self.replaced)

    def _emptied(self, rows: Sequence[Row], load: Load) -> float:
        lengths, steps = [len(row.tokens) - row.prompt for row in rows], [row.steps for row in rows]
        gain = sum(lengths) / max(1, sum(steps)) - 1
        if gain < LEAST_GAIN:
            self.shared += FORGET * (SHARED - self.shared)
            return 0.0
        seen = (max(lengths) / max(steps) - 1) / gain
        self.shared += RATE * (min(1.0, max(0.0, seen)) - self.shared)
        credited = sum([row.drafting.plain_seconds for row in rows if row.drafting is not None])
        context = sum([len(row.tokens) - length / 2 for row, length in zip(rows, lengths)]) / len(rows)
        return (1 - self.replaced / APART) * (credited - plain_seconds(lengths, context, load))


def plain_seconds(lengths: Sequence[int], context: float, load: Load) -> float:
    """Seconds of plain decoding until requests that begin together have emitted so many tokens each.

    context: positions that a row attends to, in the mean.
    """
    seconds, before = 0.0, 0
    waiting = sorted(lengths)
    for i, length in enumerate(waiting):
        rows = len(waiting) - i
        seconds += (length - before) * load.forward.base(rows, round(rows * context))
        before = length
    return load.pace * seconds
