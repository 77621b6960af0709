"""What to ask of a drafter and which of its nodes to verify, by the tokens they gain and what they cost.

A step emits `batch` tokens without drafts, in `plain` seconds.  Draft tokens pay if they raise tokens per
second.  With the rate r of the best choice, a choice pays as long as gain - r * cost > 0 (Dinkelbach 1967;
TurboSpec, arXiv 2406.14066, calls the rate goodput).
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Sequence
from itertools import accumulate
from operator import mul
from typing import NamedTuple

from outrider.control.acceptance import Calibration, key_of, keys_of
from outrider.core.tree import ROOT, DraftTree

DEPTHS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 48, 64, 128, 256, 512, 1024)
CHEAP = 0.02  # of a plain step: a drafter whose deepest drafts cost so little more drafts all of them


class Option(NamedTuple):
    """Asking one drafter for one row: expected accepted tokens, and seconds with and without verification."""

    drafter: int
    depth: int
    gain: float
    cost: float
    ask_cost: float


class Price(NamedTuple):
    """What a row's draft costs.

    fixed, per_level: seconds of drafting.  nodes_per_level: verified nodes by level.
    verify: nodes of the row -> seconds that they add to the forward.
    stops: the drafter ends its drafts by itself, so that asking for a deeper one is never worse.
    token_value: part of a plain token's time that an accepted token is worth.
    """

    fixed: float
    per_level: float
    nodes_per_level: float
    verify: Callable[[float], float]
    stops: bool = False
    token_value: float = 1.0

    def of(self, depth: int) -> float:
        """Seconds of a draft of this depth."""
        return self.fixed + self.per_level * depth + self.verify(self.nodes_per_level * depth)


def best_option(
    drafter: int, gains: Sequence[float], price: Price, batch: int, plain: float, crowd: int = 0
) -> Option:
    """The depth with the most tokens per second in a step of `batch` rows, `crowd` of which ask for it, by
    default all.

    gains[d - 1]: expected accepted tokens of a draft of depth d.  Where further levels cost next to nothing,
    the drafter is asked for its deepest draft, since `select` cuts it where the rest does not pay; gain and
    cost are those of the best depth.  One that stops by itself is asked for the deepest whose cost is known.
    The cost is infinite where that of every depth is unknown or too much.
    """
    fixed, per_level, nodes_per_level, verify, stops, token_value = price
    deepest, best, found = len(gains), 0.0, (1, 0.0, math.inf, math.inf)
    asking = crowd or batch
    for depth in (*DEPTHS[: bisect_left(DEPTHS, deepest)], deepest):
        ask, gain = fixed + per_level * depth, gains[depth - 1]
        cost = ask + verify(nodes_per_level * depth)
        value = batch + asking * token_value * gain
        if (rate := value / (plain + asking * cost)) > best or (stops and rate):
            best, found = rate, (depth, gain, cost, ask)
    if asking * per_level * (deepest - found[0]) < CHEAP * plain:
        return Option(drafter, deepest, *found[1:])
    return Option(drafter, *found)


def joint_probabilities(tree: DraftTree, calibration: Calibration) -> list[float]:
    """Probability of each node that it is accepted.

    A sampled node is judged by its rank among its siblings, which determines its confidence, and not by its
    token: rejection rules require that.
    """
    known = calibration.known
    each = [known[key] if key in known else calibration.probability(key) for key in keys_of(tree)]
    if tree.chained:
        joint = [*accumulate(each, mul)]
    else:
        joint = []
        for parent, probability in zip(tree.parents, each):
            joint.append(probability if parent == ROOT else probability * joint[parent])
    if tree.probs_of:
        _keep_order(tree, joint)
    return joint


def prefix(
    chain: DraftTree, calibration: Calibration, verify: Callable[[int], float], rate: float
) -> tuple[int, float]:
    """The first nodes of the only chain of a batch that pay, and their expected accepted tokens."""
    probability, source = calibration.probability, chain.proposers
    best, best_count, best_gain, joint, gain = 0.0, 0, 0.0, 1.0, 0.0
    for count, confidence in enumerate(chain.confidence, start=1):
        joint *= probability(key_of(source[count - 1] if source else 1, count, confidence))
        gain += joint
        value = gain - rate * verify(count)
        if value > best:
            best, best_count, best_gain = value, count, gain
        elif value + joint * (len(chain.confidence) - count) <= best:
            break  # all further ones together would not pay
    return best_count, best_gain


def missed_by(trees: Sequence[tuple[int, DraftTree]], calibration: Calibration) -> float:
    """Probability that the first tokens of (source, tree) pairs are all wrong, by the surest tree."""
    missed = 1.0
    for source, tree in trees:
        firsts = 0.0
        for parent, confidence in zip(tree.parents, tree.confidence):
            if parent == ROOT:
                firsts += calibration.probability(key_of(source, 1, confidence))
        missed = min(missed, max(0.0, 1 - firsts))
    return missed


def _keep_order(tree: DraftTree, joint: list[float]) -> None:
    """Make samples from one distribution no more probable than those drawn before them."""
    last: dict[tuple[int, int], float] = {}
    for i, (parent, distribution) in enumerate(zip(tree.parents, tree.probs_of)):
        if parent != ROOT:
            joint[i] = min(joint[i], joint[parent])
        if distribution >= 0:
            joint[i] = last[parent, distribution] = min(joint[i], last.get((parent, distribution), 1.0))


def select(joints: Sequence[Sequence[float]], costs: Sequence[float], rate: float) -> list[list[int]]:
    """The nodes of a whole batch that pay, most probable first: node numbers of each row, ascending.

    joints: probability of each node, by row.  costs: seconds that 0, 1, … nodes of the batch add.
    The seconds need not be convex: every number of nodes is tried.
    """
    ranked = [(-p, r, i) for r, joint in enumerate(joints) for i, p in enumerate(joint)]
    ranked.sort()  # a child is no more probable than its parent, and comes later
    best_value, best_count, gain = 0.0, 0, 0.0
    for count, (negated, _, _) in enumerate(ranked, start=1):
        gain -= negated
        value = gain - rate * costs[count]
        if value > best_value:
            best_value, best_count = value, count
    if best_count == len(ranked):
        return [[*range(len(joint))] for joint in joints]
    kept: list[list[int]] = [[] for _ in joints]
    for _, r, i in ranked[:best_count]:
        kept[r].append(i)
    for nodes in kept:
        nodes.sort()
    return kept
