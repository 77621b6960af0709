"""Ledger of a conservative bandit: time spent against the time that plain decoding would have taken.

    loss = spent - plain          for the same tokens
    room = share * plain + grace - loss

A step may draft only if its whole extra cost fits into the room, so a stream of requests never loses more
than 1 % and `grace` seconds, however badly its drafts fail (conservative bandits: Wu et al. 2016,
arXiv 1602.04282).  What drafts have saved may be spent on later ones.
"""

from __future__ import annotations

from dataclasses import dataclass

SHARE = 0.01  # of the time of plain decoding
GRACE, TOTAL_GRACE = 2.0, 8.0  # plain steps that a request, and all together, may lose beyond that
LEAST_STEP = (
    0.0015  # seconds that count as such a step at least: deciding takes time, however fast a model is
)
USED = 0.9  # part of the grace that may be planned with: a step may take longer than expected
SAVED = 10  # what drafts have saved counts up to so many graces


@dataclass(slots=True)
class Ledger:
    """spent, plain: seconds so far, and those of plain decoding for the same tokens.  grace: seconds."""

    grace: float = 0.0
    spent: float = 0.0
    plain: float = 0.0
    loss: float = 0.0

    def add(self, spent: float, plain: float) -> None:
        self.spent += spent
        self.plain += plain
        self.loss = max(self.loss + spent - plain, -SAVED * self.grace)

    @property
    def room(self) -> float:
        """Seconds that may still be lost."""
        return SHARE * self.plain + USED * self.grace - self.loss
