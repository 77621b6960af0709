"""What an accepted token is worth where other requests go on.

A plain step of n rows takes f + n * m seconds.  A request that ends a step sooner saves m; only the last one
of a batch saves f, too.  While others take the places of those that end, that may be any of them, and a token
is worth its share of a step, f / n + m.  In a batch that empties, the last ones are those whose drafts fail:
where drafts are accepted, requests end first, and leave f to the others.

    ahead = replaced + (1 - replaced) * (m * n + f * shared) / (f + m * n)

is the part of that share which an accepted token is worth.

    shared = (longest / steps - 1) / (rate - 1)

of a batch that has emptied: tokens of its longest answer over the steps of its last request, which is what the
batch has gained, over the mean gain of its rows.  replaced: how far others take the places, 0 to 1.
"""

from __future__ import annotations

from dataclasses import dataclass

from outrider.control.cost import ForwardCost
from outrider.core.step import Batch

SHARED = 0.8  # before any batch has emptied
RATE = 0.3  # of a batch that empties, in the moving mean of `shared`
FORGET = 0.05  # the same, where nothing was gained: what was seen need not hold any more
REPLACED = 0.1  # of a request that ends, in the moving mean of `replaced`
LEAST_GAIN = 0.2  # accepted tokens a step, in the mean, that tell something
YOUNGER = 0.75  # of the steps of a row that ends: others with fewer began later
HALF = 0.5  # part of the others that began later where all places are taken again


@dataclass(slots=True)
class Tail:
    """Moving means over the requests that end, and sums since the batch was empty.

    rows, tokens, steps: of all requests.  longest, last: most tokens, and most steps, of one.
    """

    shared: float = SHARED
    replaced: float = 0.0
    rows: int = 0
    tokens: int = 0
    steps: int = 0
    longest: int = 0
    last: int = 0

    def learn(self, batch: Batch) -> None:
        """Take in a step in which some rows have ended."""
        rows = [step.row for step in batch]
        ended = [row for row in rows if row.finish_reason is not None]
        for row in ended:
            tokens = len(row.tokens) - row.prompt
            self.rows, self.tokens, self.steps = self.rows + 1, self.tokens + tokens, self.steps + row.steps
            self.longest, self.last = max(self.longest, tokens), max(self.last, row.steps)
            if len(rows) > 1:
                younger = sum(other.steps < YOUNGER * row.steps for other in rows) / (len(rows) - 1)
                self.replaced += REPLACED * (min(1.0, younger / HALF) - self.replaced)
        if len(ended) == len(rows):
            self._empty()

    def _empty(self) -> None:
        if self.rows > 1 and self.steps:
            gain = self.tokens / self.steps - 1
            if gain < LEAST_GAIN:
                self.shared += FORGET * (SHARED - self.shared)
            else:
                seen = (self.longest / self.last - 1) / gain
                self.shared += RATE * (min(1.0, max(0.0, seen)) - self.shared)
        self.rows = self.tokens = self.steps = self.longest = self.last = 0

    def ahead(self, rows: int, forward: ForwardCost) -> float:
        """Part of a plain token's share of a step that an accepted one is worth, with so many rows."""
        if rows < 2:
            return 1.0
        alone, all_rows = forward.base(1), forward.base(rows)
        marginal = min(1.0, max(0.0, (all_rows - alone) / (rows - 1) * rows / all_rows))
        return self.replaced + (1 - self.replaced) * (marginal + (1 - marginal) * self.shared)
