"""What an accepted token is worth in a batch that empties, and what such a batch has really lost.

A plain step of n rows takes f + n * m seconds.  A request that ends a step sooner saves m; only the last one
of a batch saves f, too.  While others take the places of those that end, that may be any of them, and a token
is worth its share of a step, f / n + m.  In a batch that empties, the last ones are those whose drafts fail:
where drafts are accepted, requests end first, and leave f to the others.

    token_value = replaced + (1 - replaced) * (m * n + f * shared) / (m * n + f)

is the part of that share which an accepted token is worth.

    shared = (longest / steps - 1) / (rate - 1)

of a batch that has emptied: tokens of its longest answer over the steps of its last request, which is what
the batch has gained, over the mean gain of its rows.  replaced: how far others take the places, 0 to 1.

When requests that began together have all ended, their lengths tell what plain decoding would have taken.
What the ledger had credited beyond it was never saved.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from outrider.control.cost import ForwardCost
from outrider.core.row import Row

SHARED = 0.8  # before any batch has emptied
RATE = 0.3  # of a batch that empties, in the moving mean of `shared`
FORGET = 0.05  # the same, where nothing was gained: what was seen need not hold any more
LEAST_GAIN = 0.2  # accepted tokens a step, in the mean, that tell something
REPLACED = 0.1  # of a request that ends, in the moving mean of `replaced`
# Of the steps of a row, and less: another one with fewer began later.  Prompts of requests that begin at once
# take a few steps, and with drafts a request may end in as few.
YOUNGER, STAGGERED = 0.75, 4
HALF = 0.5  # part of the others that began later where all places are taken again
APART = 0.3  # `replaced` below which requests begin together
LEAST = 0.1  # part of its share that an accepted token is worth at least
MISSING = 0.02  # part of the tokens of a batch that may have been emitted by others


class Ended(NamedTuple):
    """A request that has ended.  tokens: emitted, in so many steps.  context: positions at its end."""

    tokens: int
    steps: int
    context: int


@dataclass(slots=True)
class Tail:
    """Moving means over requests and batches that end, and what is known of the present batch.

    ended, running: requests that have ended since the batch was empty, and those that ran on then.
    apart: they did not begin together, or some left otherwise.
    credited, emitted: seconds and tokens that the ledger took for plain since the batch was empty.
    """

    shared: float = SHARED
    replaced: float = 0.0
    ended: list[Ended] = field(default_factory=list)
    running: set[Row] = field(default_factory=set)
    apart: bool = False
    credited: float = 0.0
    emitted: int = 0

    def token_value(self, rows: int, forward: ForwardCost) -> float:
        """Part of a plain token's share of a step that an accepted one is worth, with so many rows."""
        if rows < 2:
            return 1.0
        growing = forward.growing(rows)
        gained = growing + (1 - growing) * self.shared
        return max(LEAST, self.replaced + (1 - self.replaced) * gained)

    def credit(self, plain: float, tokens: int) -> None:
        """Take in what the ledger does: seconds of plain decoding, and tokens that were emitted."""
        self.credited += plain
        self.emitted += tokens

    def learn(self, rows: Sequence[Row], ended: Sequence[Row], forward: ForwardCost) -> float:
        """Take in a step of these rows in which some have ended, after the ledger has.

        Returns seconds that the ledger has credited too much, where the batch has emptied.
        """
        steps = [row.steps for row in rows]
        self._replaced(steps, ended)
        if not self.apart:
            self._follow(rows, ended, began_later(min(steps), max(steps)))
        return 0.0 if len(ended) < len(rows) else self._emptied(forward)

    def _follow(self, rows: Sequence[Row], ended: Sequence[Row], later: bool) -> None:
        """Note the lengths of requests that have ended, as long as all began together.

        later: some of them began later than others.
        """
        self.apart = later or (bool(self.running) and self.running != {*rows})
        self.running = {*rows}.difference(ended)
        if self.apart:
            self.ended = []
        else:
            self.ended += [Ended(len(row.tokens) - row.prompt, row.steps, len(row.tokens)) for row in ended]

    def _replaced(self, steps: Sequence[int], ended: Sequence[Row]) -> None:
        if len(steps) > 1:
            for row in ended:
                younger = sum([began_later(own, row.steps) for own in steps]) / (len(steps) - 1)
                self.replaced += REPLACED * (min(1.0, younger / HALF) - self.replaced)

    def _emptied(self, forward: ForwardCost) -> float:
        group, credited, emitted = self.ended, self.credited, self.emitted
        self.ended, self.running, self.apart = [], set(), False
        self.credited, self.emitted = 0.0, 0
        if len(group) < 2:
            return 0.0
        tokens, steps = sum(row.tokens for row in group), sum(row.steps for row in group)
        gain = tokens / max(1, steps) - 1
        if gain < LEAST_GAIN:
            self.shared += FORGET * (SHARED - self.shared)
            return 0.0
        seen = (max(row.tokens for row in group) / max(row.steps for row in group) - 1) / gain
        self.shared += RATE * (min(1.0, max(0.0, seen)) - self.shared)
        if self.replaced >= APART or abs(emitted - tokens) > MISSING * tokens:
            return 0.0
        return (1 - self.replaced / APART) * (credited - plain_seconds(group, forward))


def began_later(steps: int, others: int) -> bool:
    """Whether a row with so many steps began after one with `others`."""
    return steps < YOUNGER * others - STAGGERED


def plain_seconds(group: Sequence[Ended], forward: ForwardCost) -> float:
    """Seconds of plain decoding for requests that begin together."""
    seconds, before = 0.0, 0
    context = sum(row.context - row.tokens / 2 for row in group) / len(group)  # of a row, in the mean
    for i, length in enumerate(sorted(row.tokens for row in group)):
        rows = len(group) - i
        seconds += (length - before) * forward.pace(rows) * forward.base(rows, round(rows * context))
        before = length
    return seconds
