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
from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import repeat
from typing import Any, NamedTuple

from outrider.core.tree import DraftTree

BINS = 8
FINE = 1024  # confidences that are told apart; a multiple of BINS
DEEP = 6  # depths from here on share their bins
LEVELS = 10  # depths from here on share their reach
PRIOR = 2.0  # observations that a bin's confidence is worth
REQUEST_PRIOR = 5.0  # observations that the estimate over all requests is worth in one of them
FIRST_REQUEST = 4.0  # the same while nothing is known
KEEP = 0.998  # discount of a bin over all requests, by observation
KEEP_IN_REQUEST = 0.93
KEEP_REACH = 0.9
FADE = 0.995  # discount of a request's reach, by step without asking, from so many steps on:
PAUSE = 16
FIRST_REACH = 0.5  # assumed before anything is known
# The same where much speaks for a draft before it is asked for, with the largest depth of the first one; and
# where nothing does, of a drafter that can tell.
FIRST_GRADED, FIRST_GRADED_DEPTH, FIRST_UNGRADED = 0.9, 8, 0.2
FIRST_WEIGHT = 3.0  # observations that this is worth: one miss must not end the trials of a drafter
HEAVIEST = 1e12  # weight of an observation at which all are scaled down

# lower edges of the cells of confidence, in 1 / FINE: those of the bins, and half a unit of log-odds apart
EDGES: list[int] = sorted(
    {0, *range(0, FINE + 1, FINE // BINS), *(round(FINE / (1 + math.exp(-z / 2))) for z in range(-11, 12))}
)
CELLS = len(EDGES)
CELL_OF = [bisect_right(EDGES, i) - 1 for i in range(FINE + 1)]
BIN_OF = [edge * BINS // FINE for edge in EDGES]  # of each cell


def key_of(source: int, depth: int, confidence: float) -> int:
    """Source, depth and cell of a node.  source: bit set of drafters.  depth: 1 for a child of the root.

    A confidence that is not a number counts as 0.
    """
    level = depth if depth < DEEP else DEEP
    cell = CELL_OF[int(min(confidence, 1.0) * FINE)] if confidence > 0 else 0
    return (source * (DEEP + 1) + level) * CELLS + cell


def keys_of(tree: DraftTree) -> list[int]:
    """`key_of` of every node.  Without `proposers` the first drafter is the source."""
    if tree.chained:
        depths: Iterable[int] = range(1, len(tree.tokens) + 1)
    else:
        depths = tree.depths
    proposers = tree.proposers or repeat(1)
    return [
        (proposer * (DEEP + 1) + (depth if depth < DEEP else DEEP)) * CELLS
        + CELL_OF[int(confidence * FINE) if 0 < confidence < 1 else FINE if confidence > 0 else 0]
        for proposer, depth, confidence in zip(proposers, depths, tree.confidence)
    ]


def bin_of(key: int) -> int:
    """The bin that a node's cell is part of."""
    return key // CELLS * (BINS + 1) + BIN_OF[key % CELLS]


class Calibration:
    """Accepted and rejected nodes by bin.  above: the estimate over all requests, None for that itself."""

    __slots__ = ("above", "cells", "known")

    def __init__(self, above: Calibration | None = None) -> None:
        self.above = above
        self.cells: dict[int, list[float]] = {}
        self.known: dict[int, float] = {}  # probabilities, until `refresh`

    def refresh(self) -> None:
        """Let `probability` count what was learned since the last call."""
        self.known.clear()

    def probability(self, key: int) -> float:
        """Probability that a node is accepted, given that its parent is."""
        found = self.known.get(key)
        if found is None:
            found = self.known[key] = self._estimate(key)
        return found

    def _estimate(self, key: int) -> float:
        if self.above is None:
            prior, weight = 0.05 + 0.85 * min(1.0, (BIN_OF[key % CELLS] + 0.5) / BINS), PRIOR
        else:
            prior, weight = self.above.probability(key), REQUEST_PRIOR
        cell = self.cells.get(bin_of(key))
        return prior if cell is None else (weight * prior + cell[0]) / (weight + cell[0] + cell[1])

    def exponent(self, source: int) -> float:
        """The power of a node's confidence that comes nearest to its probability."""
        both = own = PRIOR
        for depth in range(1, DEEP + 1):
            for i in range(BINS):
                cell = self.cells.get((source * (DEEP + 1) + depth) * (BINS + 1) + i)
                if cell is not None and (count := cell[0] + cell[1]) > 0:
                    confidence = math.log((i + 0.5) / BINS)
                    both += count * confidence * math.log((cell[0] + 0.5) / (count + 1))
                    own += count * confidence**2
        return both / own

    def learn(self, key: int, accepted: bool) -> None:
        keep, place = KEEP if self.above is None else KEEP_IN_REQUEST, bin_of(key)
        cell = self.cells.get(place)
        if cell is None:
            cell = self.cells[place] = [0.0, 0.0]
        cell[0] = keep * cell[0] + accepted
        cell[1] = keep * cell[1] + (not accepted)


class Outcome(NamedTuple):
    """What came of asking a drafter for some levels.

    accepted: tokens.  missed: whether the next one was wrong.
    nodes, drafted: verified nodes, and drafted levels, by requested level.
    """

    accepted: int
    missed: bool
    nodes: float = 1.0
    drafted: float = 1.0


class Reach:
    """Of one drafter: the probability that the token at each depth is accepted if the one above it was.

    above: the estimate over all requests.  per_level, drafted: verified nodes, and drafted levels, by
    requested level.  weight: of the next observation, which grows instead of shrinking all earlier ones.
    empty: asks in which it had nothing to propose, which are among the misses of the first level.
    expected: probability of a token that is assumed before anything is known.
    """

    __slots__ = (
        "above", "asked", "current", "drafted", "empty", "expected", "hits", "misses", "per_level", "step",
        "weight",
    )  # fmt: skip

    def __init__(self, above: Reach | None = None, expected: float = FIRST_REACH) -> None:
        self.above, self.weight, self.expected = above, 1.0, expected
        self.hits, self.misses = [0.0] * LEVELS, [0.0] * LEVELS
        self.per_level: float = 1.0 if above is None else above.per_level
        self.drafted: float = 1.0 if above is None else above.drafted
        self.asked, self.empty = 0, 0.0
        self.step = 0  # when it last learned or faded
        self.current: tuple[list[float], list[float]] | None = None

    @property
    def estimates(self) -> tuple[list[float], list[float]]:
        """Means and standard deviations by depth, from 1."""
        if self.current is None:
            self.current = self._estimates()
        return self.current

    def _estimates(self) -> tuple[list[float], list[float]]:
        above, unit = self.above, 1 / self.weight
        # what is expected of a graded draft counts less: misses show as soon that it fails
        first = FIRST_WEIGHT * min(1.0, FIRST_REACH / self.expected)
        weight = first if above is None else min(REQUEST_PRIOR, FIRST_REQUEST + 0.2 * above.asked)
        hits = [unit * part for part in self.hits]
        counts = [weight + hit + unit * part for hit, part in zip(hits, self.misses)]
        if above is None:
            means, prior, empty = [], self.expected, unit * self.empty
            for hit, count in zip(hits, counts):
                means.append((weight * prior + hit) / count)
                # the next level is expected to be like this one, but for asks that proposed nothing
                prior, empty = (weight * prior + hit) / (count - empty), 0.0
        else:
            priors = above.estimates[0]
            means = [(weight * prior + hit) / count for prior, hit, count in zip(priors, hits, counts)]
        return means, [math.sqrt(mean * (1 - mean) / (count + 1)) for mean, count in zip(means, counts)]

    @property
    def most(self) -> int:
        """The largest depth to ask for: first asks are short, since little is known."""
        return (FIRST_GRADED_DEPTH if self.expected > FIRST_REACH else 1) << min(10, self.asked)

    def fade(self, step: int) -> None:
        """Discount what was learned before `step`, the number of steps of the request."""
        if step > self.step + PAUSE:
            self._discount(FADE ** (step - self.step))
            self.step = step

    def _discount(self, factor: float) -> None:
        self.weight /= factor
        self.current = None
        if self.weight > HEAVIEST:
            self.hits = [hits / self.weight for hits in self.hits]
            self.misses = [misses / self.weight for misses in self.misses]
            self.empty /= self.weight
            self.weight = 1.0

    def learn(self, outcome: Outcome, step: int = 0) -> None:
        """Take in an ask."""
        accepted, missed, nodes, drafted = outcome
        self._discount(KEEP if self.above is None else KEEP_REACH)
        last, weight = LEVELS - 1, self.weight
        for i in range(min(accepted, last)):
            self.hits[i] += weight
        if accepted > last:
            self.hits[last] += weight * (accepted - last)
        if missed:
            self.misses[min(accepted, last)] += weight
            self.empty += weight * (not nodes)
        self.asked += 1
        rate = max(1 / self.asked, 0.02 if self.above is None else 0.1)
        self.per_level += rate * (nodes - self.per_level)
        self.drafted += rate * (drafted - self.drafted)
        self.step = step

    def report(self) -> dict[str, Any]:
        """For people: how often it was asked, and acceptance by depth."""
        return {"asked": self.asked, "acceptance_by_depth": [round(mean, 3) for mean in self.estimates[0]]}

    def gains(self, z: float, depth: int) -> list[float]:
        """Expected accepted tokens by depth 1 … depth, with every mean moved by z standard deviations."""
        gains, joint, gain = [], 1.0, 0.0
        means, sds = self.estimates
        moved = [min(0.99, max(0.0, mean + z * sd)) for mean, sd in zip(means, sds)]
        moved += moved[-1:] * (depth - LEVELS)
        for i in range(depth):
            joint *= moved[i]
            gain += joint
            gains.append(gain)
        return gains


@dataclass(slots=True)
class Tenth:
    """Nodes whose predicted acceptance is in one tenth of [0, 1].  predicted: its sum over them."""

    predicted: float = 0.0
    accepted: int = 0
    nodes: int = 0


class Reliability:
    """Predicted against observed acceptance of nodes whose parent was accepted, in tenths."""

    def __init__(self) -> None:
        self.tenths = [Tenth() for _ in range(10)]

    def add(self, probability: float, accepted: bool) -> None:
        tenth = self.tenths[min(9, int(10 * probability))]
        tenth.predicted += probability
        tenth.accepted += accepted
        tenth.nodes += 1

    def table(self) -> list[tuple[float, float, int]]:
        """(mean predicted, share accepted, nodes) of every tenth that occurred."""
        seen = [tenth for tenth in self.tenths if tenth.nodes]
        return [(each.predicted / each.nodes, each.accepted / each.nodes, each.nodes) for each in seen]
