"""From a head's logits to guesses, with the request's own parameters and the noise of the position.

Where the rule judges guesses by their laws they are drawn; otherwise the best are taken under the noise that the target's own pick
will have there, so that a head near the target's law says the target's token (arXiv 2408.07978).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from outrider.draft.base import Target
from outrider.draft.draft_model.tree import RANKED
from outrider.errors import OutriderError
from outrider.sampling.noise import key_of
from outrider.types import Row


class Chooser:
    """ids: int32 [Vd], the target's token of each of the head's; None where they are the same."""

    def __init__(self, target: Target, ids: Tensor | None = None) -> None:
        self.sampler, self.vocabulary, self.kernels = target.sampler, target.vocabulary, target.decoder.kernels
        self.ids = None if ids is None else ids.to(torch.int32).contiguous()
        self.tokens = None if ids is None else ids.long()

    def best(self, row: Row, paths: Sequence[Sequence[int]], logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """The k <= 64 best tokens behind each path (token ids from the root on), best first: int64 [n, k], -1 where there are fewer, and
        how likely each is: float32 [n, k], 0 there.  logits float32 [n, Vd].

        At a temperature the rank says more than the draft's own probability, because the noise is shared.
        """
        k = min(k, logits.shape[1])
        if row.processors:
            tokens, shares = self._one_by_one(row, paths, self.wide(logits), k)
        else:
            noised = row.law.temperature > 0
            keys = [key_of(row.seed, row.index, len(row.tokens) + len(path)) if noised else 0 for path in paths]
            found, shares = self.kernels.picks(self._cut(logits), row.law, keys, k, self.ids, not noised)
            tokens = found.long() if self.tokens is None else torch.where(found >= 0, self.tokens[found.clamp_min(0)], -1)
        if row.law.temperature > 0:
            shares = torch.where(tokens >= 0, torch.tensor(RANKED[:k]), 0.0)
        return tokens, shares

    def law(self, row: Row, path: Sequence[int], logits: Tensor) -> Tensor | None:
        """q behind a path, float64 [V] over the target's tokens; None where it fails.  logits float32 [Vd]."""
        try:
            return self.sampler.law(row, path, self.wide(logits[None])[0])
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
        return logits[:, : self.vocabulary] if self.ids is None and logits.shape[1] > self.vocabulary else logits

    def _one_by_one(self, row: Row, paths: Sequence[Sequence[int]], logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """Where processors look at the text before each."""
        tokens, shares = torch.full((len(paths), k), -1), torch.zeros(len(paths), k)
        for i, path in enumerate(paths):
            found, probable = self.sampler.top(row, path, logits, k, True, i)
            tokens[i, : len(found)], shares[i, : len(found)] = torch.tensor(found, dtype=torch.int64), torch.tensor(probable)
        return tokens, shares
