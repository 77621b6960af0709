"""What came of a step's drafts: how deep each drafter went, which nodes were judged, which were accepted."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import compress

from outrider.control.acceptance import Outcome, keys_of
from outrider.control.plan import Try
from outrider.core.step import RowStep
from outrider.core.tree import ROOT, DraftTree


def chain_source(tree: DraftTree) -> int:
    """The bit set of drafters that proposed every node of a chain; 0 for other trees."""
    proposers = tree.proposers
    if not tree.chained or (proposers and proposers.count(proposers[0]) < len(proposers)):
        return 0
    return proposers[0] if proposers else 1


def note_depths(tried: Try, step: RowStep, bits: Sequence[int]) -> None:
    """Depth of each drafter's own tree before it is cut, and which ones ended at the floor.

    bits[k]: those of the proposers whose nodes are drafter k's.
    """
    tree, size, floors = step.tree, step.tree.size, tried.plan.floors
    if source := chain_source(tree):
        joint = math.prod(tree.confidence[:size])
        tried.proposed = {k: size for k in tried.asked if source & bits[k]}
        tried.ended = {k for k in tried.proposed if joint < floors[k]}
        return
    ends: dict[int, tuple[int, float]] = {}  # drafter -> its largest depth, and its best path there
    paths = {ROOT: (0, 1.0)}
    for i in range(size):
        depth, joint = paths[tree.parents[i]]
        path = paths[i] = depth + 1, joint * tree.confidence[i]
        source = tree.proposers[i] if tree.proposers else 1
        for k in tried.asked:
            if source & bits[k]:
                ends[k] = max(ends.get(k, path), path)
    tried.proposed = {k: depth for k, (depth, _) in ends.items()}
    tried.ended = {k for k, (_, joint) in ends.items() if joint < floors[k]}


def share_of(step: RowStep, bits: int) -> tuple[int, int, int, int]:
    """Of the drafter with these bits: depth accepted, depth judged, depth and nodes verified."""
    tree, size = step.tree, step.tree.size
    if chain_source(tree) & bits:
        right = len(step.accepted)
        return right, right + (right < size), size, size
    own = [not tree.proposers or bool(tree.proposers[i] & bits) for i in range(size)]
    accepted = 0
    for node in step.accepted:
        if not own[node]:
            break
        accepted += 1
    last = step.accepted[accepted - 1] if accepted else ROOT
    behind = any(mine and parent == last for mine, parent in zip(own, tree.parents))
    return accepted, accepted + behind, max(compress(tree.depths, own), default=0), sum(own)


def outcome_of(step: RowStep, tried: Try, k: int, bits: int, ended: bool) -> Outcome:
    """What came of asking drafter k, with these bits.  ended: the text ended."""
    right, verified, levels, nodes = share_of(step, bits)
    asked, proposed, stopped = tried.asked[k], tried.proposed.get(k, 0), k in tried.ended
    # not missed, but not known either: at the end of the text, at the floor, and where trim has cut
    missed = right < asked and (verified > right or (proposed <= right and not stopped)) and not ended
    if stopped:
        return Outcome(right, missed, nodes / asked, proposed / asked)
    return Outcome(right, missed, nodes / max(1, levels))


def judged(step: RowStep, ended: bool) -> Iterator[tuple[int, bool]]:
    """(bin, whether it was accepted) of the children of the accepted path.

    ended: the text ended, so that what hangs from the last accepted node was not judged.
    """
    tree, path, keys = step.tree, step.accepted, keys_of(step.tree)
    if chain_source(tree):
        right = len(path)
        for i in range(right if ended else min(right + 1, tree.size)):
            yield keys[i], i < right
        return
    on_path = {ROOT, *path}
    last = path[-1] if path else ROOT
    for i in range(tree.size):
        parent = tree.parents[i]
        if parent in on_path and not (ended and parent == last):
            yield keys[i], i in on_path
