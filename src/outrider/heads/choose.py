"""From a head's logits to guesses, with the request's own parameters and the noise of the position.

Where the rule judges guesses by their laws they are drawn; otherwise the best are taken under the noise that the target's own pick
will have there, so that a head near the target's law says the target's token (arXiv 2408.07978).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from outrider.backends.candidates import Candidates, Found
from outrider.core.noise import key_of
from outrider.core.row import Row
from outrider.drafting.base import Target
from outrider.drafting.trees.sampled import RANKED
from outrider.errors import OutriderError


class Chooser:
    """ids: int32 [Vd], the target's token of each of the head's; None where they are the same."""

    def __init__(self, target: Target, ids: Tensor | None = None) -> None:
        self.sampler, self.vocabulary, self.backend = (
            target.sampler,
            target.vocabulary,
            target.decoder.backend,
        )
        self.ids = None if ids is None else ids.to(torch.int32).contiguous()
        self.ranked = torch.tensor(RANKED)

    def best(self, row: Row, paths: Sequence[Sequence[int]], logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """The k <= 64 best tokens behind each path (token ids from the root on), best first: int64 [n, k], -1 where there are fewer, and
        how likely each is: float32 [n, k], 0 there.  logits float32 [n, Vd].

        At a temperature the rank says more than the draft's own probability, because the noise is shared.
        """
        return self.found(row, paths, logits, k).read()

    def found(self, row: Row, paths: Sequence[Sequence[int]], logits: Tensor, k: int) -> Found:
        """The same, as entries of the head's vocabulary."""
        k, noised = min(k, logits.shape[1]), row.distribution.temperature > 0
        ranked = self.ranked if noised else None
        if row.processors:
            return Found(*self._one_by_one(row, paths, self.wide(logits), k), ranked=ranked)
        keys = [0] * len(paths)
        if noised:
            of = {
                depth: key_of(row.seed, row.index, len(row.tokens) + depth) for depth in set(map(len, paths))
            }
            keys = [of[len(path)] for path in paths]
        return Found(
            *self.backend.pick_rows(self._cut(logits), row.distribution, keys, k, self.ids, not noised),
            self.ids,
            ranked,
        )

    def widen(
        self, candidates: Candidates, row: Row, paths: Sequence[Sequence[int]], logits: Tensor
    ) -> tuple[list[int], list[int]]:
        """The next level of a dynamic tree, whose paths are equally long: what `Candidates.widen` makes of what is found behind them."""
        if row.processors:
            return candidates.widen(self.found(row, paths, logits, candidates.k))
        noised = row.distribution.temperature > 0
        key = key_of(row.seed, row.index, len(row.tokens) + len(paths[0])) if noised else 0
        return candidates.grow(
            self._cut(logits), row.distribution, key, self.ids, self.ranked if noised else None
        )

    def distribution(self, row: Row, path: Sequence[int], logits: Tensor) -> Tensor | None:
        """q behind a path, float64 [V] over the target's tokens; None where it fails.  logits float32 [Vd]."""
        try:
            return self.sampler.distribution(row, path, self.wide(logits[None])[0])
        except OutriderError:  # the target's own law will say why
            return None

    def wide(self, logits: Tensor) -> Tensor:
        """[n, Vd] over the target's tokens, [n, V]: -inf where the head knows none."""
        if self.ids is None and logits.shape[1] >= self.vocabulary:
            return self._cut(logits)
        out = logits.new_full((len(logits), self.vocabulary), float("-inf"))
        if self.ids is None:
            out[:, : logits.shape[1]] = logits
        else:
            out[:, self.ids.long().to(out.device)] = logits
        return out

    def _cut(self, logits: Tensor) -> Tensor:
        return (
            logits[:, : self.vocabulary] if self.ids is None and logits.shape[1] > self.vocabulary else logits
        )

    def _one_by_one(
        self, row: Row, paths: Sequence[Sequence[int]], logits: Tensor, k: int
    ) -> tuple[Tensor, Tensor]:
        """Where processors look at the text before each."""
        tokens, shares = torch.full((len(paths), k), -1, dtype=torch.int32), torch.zeros(len(paths), k)
        for i, path in enumerate(paths):
            found, probable = self.sampler.top(row, path, logits, k, True, i)
            tokens[i, : len(found)], shares[i, : len(found)] = (
                torch.tensor(found, dtype=torch.int32),
                torch.tensor(probable),
            )
        return tokens, shares
