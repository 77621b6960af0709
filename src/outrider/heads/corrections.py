"""Correction of a position's logits by the tokens of its block before it, level by level."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from outrider.core.row import Row
from outrider.heads.choose import Chooser
from outrider.heads.ranks import Path
from outrider.heads.trees import Growth, RankTree, frontier_tokens


class CorrectionOutput(NamedTuple):
    """Output of a correction for n places.

    bias: float32 [n, Vd], added to the logits, whose padding may differ; None for none.
    state: [n, width], for the next level.
    acceptance: float32 [n], expected of the tokens at these places; None: estimated from the logits.
    """

    bias: Tensor | None
    state: Tensor
    acceptance: Tensor | None = None


class Correction:
    """The correction of a head, on the target's kernels."""

    def begin(self, tokens: Sequence[int], before: Tensor) -> Tensor:
        """State [n, width] of n trees.  tokens: of the anchors.  before: their states, or empty."""
        raise NotImplementedError

    def __call__(
        self, level: int, tokens: Sequence[int], x: Tensor, state: Tensor, logits: Tensor
    ) -> CorrectionOutput:
        """Correction by the tokens before n places; x [n, h]: the places' states; logits [n, Vd]."""
        raise NotImplementedError


class CorrectedTree(RankTree):
    """A tree of a block whose logits are corrected.

    logits: [levels, Vd] before that.  anchor [1, h]: state of the anchor's row, if it predicts nothing; else
    [0, h].  states: [levels, h].
    """

    def __init__(
        self, row: Row, logits: Tensor, states: Tensor, paths: Collection[Path], sampled: bool, stream_id: int
    ) -> None:
        """states: [rows of the block, h]."""
        super().__init__(row, paths, sampled=sampled, stream_id=stream_id)
        self.logits = logits
        self.anchor, self.states = torch.split(states, [len(states) - len(logits), len(logits)])

    def at(self, places: Tensor, level: int) -> Tensor:
        """The row of a level of places [levels, …], for every node of the frontier."""
        return places[level].expand(len(self.frontier), -1)


def grow_corrected(trees: Sequence[CorrectedTree], correct: Correction, choose: Chooser) -> None:
    """Grow trees together, level by level."""
    growth = Growth(trees, choose)
    state = correct.begin(frontier_tokens(trees), torch.cat([tree.anchor for tree in trees]))
    while growth.trees:
        now, level = growth.trees, growth.level
        x = torch.cat([tree.at(tree.states, level) for tree in now])
        logits = torch.cat([tree.at(tree.logits, level) for tree in now])
        bias, state, acceptance = correct(level, frontier_tokens(now), x, state[growth.sources], logits)
        if acceptance is not None:
            sizes = [len(tree.frontier) for tree in now]
            for tree, own in zip(now, torch.split(acceptance, sizes)):
                tree.acceptance = own.tolist()
        if bias is not None:
            # Beyond these columns is padding, or one of the two lacks the token.
            common = min(logits.shape[1], bias.shape[1])
            logits = logits[:, :common] + bias[:, :common]
        growth.add(logits)
