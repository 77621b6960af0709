"""Draft trees of all rows that grow where their logits are: the host reads them once, when they are complete.

How many nodes a level has, their positions and their slots are known before any token.  So the host lays out
the forwards of all levels first.  What follows from tokens goes from one forward to the next on the device:
tokens, and the slots of paths where a token decides about its parent.  A device can record all of it.

    DynamicGrowth  dynamic trees: the device chooses which nodes are expanded, and which are kept
    RankGrowth     trees of given ranks: only tokens are unknown
    ChainGrowth    chains

One pass has the logits of a `BlockTree`; `grow_blocks` reads those of all rows at once.

The trees are those of `heads/trees.py`, level by level.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from outrider.core.row import Row
from outrider.heads.choose import Chooser
from outrider.heads.dynamic_growth import DynamicGrowth
from outrider.heads.growth import DeviceGrowth
from outrider.heads.rank_growth import ChainGrowth, RankGrowth
from outrider.heads.trees import BlockTree, DynamicTree, LevelTree, RankTree


def on_device(trees: Sequence[LevelTree], choose: Chooser) -> DeviceGrowth | None:
    """The growth of these empty trees on the device; None if the host has to see every level."""
    ranked, dynamic = list[RankTree](), list[DynamicTree]()
    for tree in trees:
        if isinstance(tree, DynamicTree):
            dynamic.append(tree)
        elif type(tree) is RankTree and not tree.sampled and tree.acceptance is None:
            ranked.append(tree)
        else:
            return None
    rows = [*(tree.row for tree in ranked), *(tree.row for tree in dynamic)]
    if (dynamic and ranked) or not rows or not choose.stays_on_device(rows):
        return None
    if ranked:
        return RankGrowth(ranked, choose)
    return DynamicGrowth(dynamic) if any(tree.k > 1 for tree in dynamic) else ChainGrowth(dynamic)


def grow_blocks(trees: Sequence[BlockTree], choose: Chooser) -> None:
    """Add all levels to trees of ranks, from their logits; one read for those without logits processors."""
    chosen = [tree for tree in trees if not tree.sampled and tree.children]
    chosen = [tree for tree in chosen if choose.stays_on_device([tree.row])]
    if chosen:
        _rank_levels(chosen, choose)
    for tree in trees:
        tree.grow(choose)


def _rank_levels(trees: Sequence[BlockTree], choose: Chooser) -> None:
    """Set the best tokens of all levels of all trees, by one read of the device."""
    rows, depths = list[Row](), list[int]()  # of all levels
    for tree in trees:
        rows += [tree.row] * len(tree.logits)
        depths += range(len(tree.logits))
    k = max(max(tree.children.values()) for tree in trees)
    tokens, confidences = choose.next_tokens(rows, depths, torch.cat([tree.logits for tree in trees]), k)
    levels = iter(torch.stack([tokens.double(), confidences.double()], -1).tolist())
    for tree in trees:
        for _ in tree.logits:
            best = [(int(token), confidence) for token, confidence in next(levels) if token >= 0]
            tree.level_rankings.append(best)
