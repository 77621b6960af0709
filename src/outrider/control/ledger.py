"""Ledger of a conservative bandit: time spent against the time that plain decoding would have taken.

    loss = spent - plain          for the same tokens
    room = share * plain + grace - loss         share: 1 %, less where more than `CROWD` requests share a step

A step may draft only if its whole extra cost fits into the room, so a stream of requests never loses more
than 1 % and `grace` seconds, however badly its drafts fail (conservative bandits: Wu et al. 2016,
arXiv 1602.04282).  Drafts that surely pay need no room while there is a reserve: if they fail, one step of
them may go beyond it.  What drafts have saved may be spent on later ones.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

SHARE = 0.01  # of the time of plain decoding
# Requests up to which a batch may lose all that is allowed; one of n > CROWD, CROWD / n of it: drafts gain
# less there, as far as a step takes longer for more rows.
CROWD = 8
KNOWN_GRACE = 4.0  # `Grace.total`, where every drafter is known from an earlier start
# Seconds for all together, or KNOWN_GRACE plain steps of one request, if these take longer: in a large batch
# drafts gain less, and a step takes longer.
MOST_GRACE = 0.02
USED = 0.9  # part of the grace that may be planned with: a step may take longer than expected
RESERVE = 0.2  # part of the grace of all requests that is kept for the time in which there is no room
MOST_KEPT = 4.0  # plain steps that drafts saved before this start and that may be spent in it
SAVED = 10  # what drafts have saved counts up to so many graces
EXPLORE = 0.005  # part of the time for each drafter that does not seem to pay
# Plain steps of one-time work that count in a step: recording a graph may take ten, but only once, and drafts
# would have to rest for a thousand steps after it.
MOST_ONCE = 2.0
FIRST_TRIALS, MOST_TRIALS = 4.0, 2.0  # plain steps that such a drafter may take at first, and save up


class Grace(NamedTuple):
    """What may be lost beyond `SHARE`, in plain steps.

    each: by a request, and `SPARE` of what drafts have saved (planner.py).  total: by all together.
    least: seconds of such a step at least, because deciding takes time, however fast a model is.
    """

    each: float = 2.0
    total: float = 8.0
    least: float = 0.0015


USUAL_GRACE = Grace()


class Moment(NamedTuple):
    """Sums of all steps up to some time: steps by drafters asked, seconds, and those of plain decoding.

    loss, room: of the ledger, in seconds.
    """

    steps: Mapping[str, int]
    seconds: float
    plain_seconds: float
    loss: float
    room: float


@dataclass(slots=True)
class Ledger:
    """Seconds lost so far, in sum, and what may still be lost.

    earned: seconds that may be lost by their share of plain decoding.  loss: seconds beyond plain decoding;
    below 0 what drafts have saved, up to `SAVED` graces.  grace: seconds.
    kept: part of the grace that is no room, but a reserve for the time without room: other work may have used
    all of it, and drafts that surely pay are the way out of debt.  used: seconds of it that drafts have lost.
    """

    grace: float = 0.0
    earned: float = 0.0
    loss: float = 0.0
    kept: float = 0.0
    used: float = 0.0

    def add(self, spent: float, plain: float, share: float = SHARE) -> None:
        """Enter seconds of steps, and those of plain decoding for the same tokens."""
        self.earned += share * plain
        self.loss = max(self.loss + spent - plain, -SAVED * self.grace)

    def add_steps(self, spent: float, plain: float, share: float) -> None:
        """Enter seconds of steps, for which drafts may have used the reserve."""
        self.add(spent, plain, share)
        self.used = 0.0 if self.room > 0 else max(0.0, self.used + spent - (1 + share) * plain)

    def add_once(self, lost: float, step: float) -> None:
        """Enter one-time work in a step, a plain one of which takes `step` seconds."""
        self.add(min(lost, MOST_ONCE * step), 0.0)

    @property
    def reserve(self) -> float:
        """Seconds left of what is kept."""
        return self.kept * self.grace - self.used

    @property
    def left(self) -> float:
        """The room, or the reserve where that is more."""
        return max(self.room, self.reserve)

    @property
    def room(self) -> float:
        """Seconds that may still be lost."""
        return self.earned + (USED - self.kept) * self.grace - self.loss


@dataclass(slots=True)
class Trials:
    """`EXPLORE` of all requests' time for a drafter that does not seem to pay.  room: seconds left for it.

    part: `allowance` of the batch
    """

    room: float

    def earn(self, plain: float, step: float, part: float = 1.0) -> None:
        """Take in so many seconds of plain decoding, a step of which takes `step`."""
        self.room = max(self.room, min(self.room + part * EXPLORE * plain, part * MOST_TRIALS * step))

    def wait(self, cost: float, step: float, part: float = 1.0) -> float:
        """Plain steps until it may cost so much: infinite if the room never grows that large."""
        if cost <= self.room:
            return 0
        within_reach = cost <= part * MOST_TRIALS * step
        return math.ceil((cost - self.room) / (part * EXPLORE * step)) if within_reach else math.inf


def allowance(batch: int, growing: float = 1.0) -> float:
    """Part of the usual losses that a batch of so many requests may have.

    growing: part of its steps that is taken for each request (`ForwardCost.growing`); half counts as all
    """
    return min(1.0, CROWD / (1 + min(1.0, 2 * growing) * max(0, batch - 1)))
