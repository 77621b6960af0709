"""Probability that a draft token is accepted, learned for each source, depth and confidence.

Two estimates, each first over all requests and then adapted to one:

- `Calibration`: confidence of a node -> probability that it is accepted if its parent is (Beta bins).  A
  match of an n-gram, a softmax and a count become comparable by it.  The source of a node is the set of
  drafters that proposed it, so that agreement counts.
- `Reach`: probability that a drafter that is asked gets its i-th token accepted if the one before was, before
  it has proposed anything.

Old observations are discounted, because a text changes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

BINS = 8
DEEP = 6  # depths from here on share their bins
LEVELS = 10  # depths from here on share their reach
PRIOR = 2.0  # observations that a bin's confidence is worth
REQUEST_PRIOR = 5.0  # observations that the estimate over all requests is worth in one of them
KEEP = 0.998  # discount of a bin over all requests, by observation
KEEP_IN_REQUEST = 0.93
KEEP_REACH = 0.9
FADE = 0.995  # discount of a request's reach, by step without asking
FIRST_REACH = 0.5  # assumed before anything is known


def key_of(source: int, depth: int, confidence: float) -> int:
    """The bin of a node.  source: bit set of drafters.  depth: 1 for a child of the root."""
    level = depth if depth < DEEP else DEEP
    bin = int(confidence * BINS)
    return (source * (DEEP + 1) + level) * (BINS + 1) + bin


class Calibration:
    """Accepted and rejected nodes by bin.

    above: the estimate over all requests, None for that itself.
    """

    def __init__(self, above: Calibration | None = None) -> None:
        self.above = above
        self.cells: dict[int, list[float]] = {}

    def probability(self, key: int, confidence: float) -> float:
        """Probability that a node of a bin is accepted, given that its parent is."""
        if self.above is None:
            prior, weight = 0.05 + 0.85 * min(confidence, 1.0), PRIOR
        else:
            prior, weight = self.above.probability(key, confidence), REQUEST_PRIOR
        cell = self.cells.get(key)
        if cell is None:
            return prior
        return (weight * prior + cell[0]) / (weight + cell[0] + cell[1])

    def learn(self, key: int, accepted: bool) -> None:
        keep = KEEP if self.above is None else KEEP_IN_REQUEST
        cell = self.cells.get(key)
        if cell is None:
            cell = self.cells[key] = [0.0, 0.0]
        cell[0] = keep * cell[0] + accepted
        cell[1] = keep * cell[1] + (not accepted)


class Reach:
    """Of one drafter: means[i], sds[i] of the probability that the token at depth i + 1 is accepted.

    above: the estimate over all requests.  per_level: verified nodes by requested level.
    """

    __slots__ = ("above", "asked", "hits", "means", "misses", "per_level", "sds", "step")

    def __init__(self, above: Reach | None = None) -> None:
        self.above = above
        self.hits, self.misses = [0.0] * LEVELS, [0.0] * LEVELS
        self.per_level: float = 1.0 if above is None else above.per_level
        self.asked = 0
        self.step = 0  # when it last learned or faded
        self.means: list[float] = []
        self.sds: list[float] = []
        self._refresh()

    def _refresh(self) -> None:
        above = self.above
        means: list[float] = []
        sds: list[float] = []
        for i, (hits, misses) in enumerate(zip(self.hits, self.misses)):
            if above is None:
                prior, weight = (FIRST_REACH if i == 0 else means[-1]), 1.0
            else:
                prior, weight = above.means[i], min(REQUEST_PRIOR, 1.0 + 0.2 * above.asked)
            count = weight + hits + misses
            mean = (weight * prior + hits) / count
            means.append(mean)
            sds.append(math.sqrt(mean * (1 - mean) / (count + 1)))
        self.means, self.sds = means, sds

    def fade(self, step: int) -> None:
        """Discount what was learned before `step`, the number of steps of the request."""
        if step > self.step + 16:
            factor = FADE ** (step - self.step)
            self._scale(factor)
            self.step = step
            self._refresh()

    def _scale(self, factor: float) -> None:
        self.hits = [factor * hits for hits in self.hits]
        self.misses = [factor * misses for misses in self.misses]

    def learn(self, accepted: int, missed: bool, nodes: float, step: int = 0) -> None:
        """Take in an ask: tokens accepted, whether the next one was missed, verified nodes by level."""
        keep = KEEP if self.above is None else KEEP_REACH
        self._scale(keep)
        last = LEVELS - 1
        for i in range(min(accepted, last)):
            self.hits[i] += 1
        if accepted > last:
            self.hits[last] += accepted - last
        if missed:
            self.misses[min(accepted, last)] += 1
        self.asked += 1
        self.per_level += (0.02 if self.above is None else 0.1) * (nodes - self.per_level)
        self.step = step
        self._refresh()

    def report(self) -> dict[str, Any]:
        """For people: how often it was asked, and acceptance by depth."""
        return {"asked": self.asked, "acceptance_by_depth": [round(mean, 3) for mean in self.means]}

    def gains(self, z: float, depth: int) -> list[float]:
        """Expected accepted tokens by depth 1 … depth, with every mean moved by z standard deviations."""
        gains, joint, gain, last = [], 1.0, 0.0, LEVELS - 1
        means, sds = self.means, self.sds
        for i in range(depth):
            at = i if i < last else last
            p = means[at] + z * sds[at]
            joint *= 0.0 if p < 0 else p if p < 0.99 else 0.99
            gain += joint
            gains.append(gain)
        return gains


@dataclass
class Reliability:
    """Predicted against observed acceptance of nodes whose parent was accepted, in tenths."""

    predicted: list[float] = field(default_factory=lambda: [0.0] * 10)
    accepted: list[int] = field(default_factory=lambda: [0] * 10)
    counts: list[int] = field(default_factory=lambda: [0] * 10)

    def add(self, probability: float, accepted: bool) -> None:
        i = min(9, int(10 * probability))
        self.predicted[i] += probability
        self.accepted[i] += accepted
        self.counts[i] += 1

    def table(self) -> list[tuple[float, float, int]]:
        """(mean predicted, share accepted, nodes) of every tenth that occurred."""
        rows = zip(self.predicted, self.accepted, self.counts)
        return [(p / n, a / n, n) for p, a, n in rows if n]
