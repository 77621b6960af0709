"""Draft tokens from a head's logits, under the request's own sampling parameters and the noise of the
position.

Under verification rules that compare p with q, draft tokens are sampled from `distribution`.  Otherwise
they are the best tokens after adding the noise that the target's own pick will have there: a head close to
the target then proposes the target's token (arXiv 2408.07978).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from outrider.backends.candidates import Candidates, Found
from outrider.backends.launch import on_device
from outrider.core.device import Numbers
from outrider.core.noise import key_in
from outrider.core.row import Row
from outrider.drafting.base import Target
from outrider.drafting.trees.builder import RANK_CONFIDENCE

AT_ONCE = 1 << 24  # logits that `next_tokens` ranks in one call; ranking takes some ten times their memory


class Asked(NamedTuple):
    """Paths as a backend takes them: words of `TopNext.asked`, and [n]: 1 for those whose tokens have noise.

    probs: whether any token has none.
    """

    words: Any
    noised: Numbers
    probs: bool


class Chooser:
    """ids: int32 [Vd], the target's token of each of the head's; None where they are the same."""

    def __init__(self, target: Target, ids: Tensor | None = None) -> None:
        self.sampler, self.vocabulary = target.sampler, target.vocabulary
        self.backend = target.decoder.backend
        self.ids = None if ids is None else ids.to(torch.int32).contiguous()
        self.ids_on_device = None if self.ids is None else self.ids.to(self.backend.device)
        self.rank_confidence = torch.tensor(RANK_CONFIDENCE)
        self.ranks_on_device = self.rank_confidence.to(self.backend.device)

    def best(self, row: Row, paths: Sequence[Sequence[int]], logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """The k <= 64 best tokens after each path, best first, and their probabilities.

        paths: token ids from the root on.  logits: float32 [n, Vd].  Returns int64 [n, k], -1 where there
        are fewer, and float32 [n, k], 0 there.  At a temperature the noise is shared with the target, so
        the rank gives the probability.
        """
        return self.found(row, paths, logits, k).read()

    def ranked(
        self, row: Row, paths: Sequence[Sequence[int]], logits: Tensor, k: int
    ) -> list[list[tuple[int, float]]]:
        """`best` as lists of (token, probability), one a path."""
        tokens, shares = self.best(row, paths, logits, k)
        return [
            [(token, share) for token, share in zip(*path) if token >= 0]
            for path in zip(tokens.tolist(), shares.tolist())
        ]

    def found(self, row: Row, paths: Sequence[Sequence[int]], logits: Tensor, k: int) -> Found:
        """`best` as entries of the head's vocabulary."""
        k, noised = min(k, logits.shape[1]), row.distribution.temperature > 0
        ranked = self.rank_confidence if noised else None
        if row.processors:
            return Found(*self._path_by_path(row, paths, self.wide(logits), k), ranked=ranked)
        keys = [0] * len(paths)
        if noised:
            keys_by_depth = {depth: self._key(row, depth) for depth in set(map(len, paths))}
            keys = [keys_by_depth[len(path)] for path in paths]
        picks = self.backend.pick_rows(self._cut(logits), row.distribution, keys, k, self.ids, not noised)
        return Found(*picks, self.ids, ranked)

    def next_tokens(
        self, rows: Sequence[Row], depths: Sequence[int], logits: Tensor, k: int
    ) -> tuple[Tensor, Tensor]:
        """`best` after paths of several rows, none with processors; the host reads nothing.

        rows, depths: of every path, and its length.
        Returns int64 and float32 [n, min(k, Vd)] on the device of the logits.
        """
        words, noised, probs = self.asked(rows, depths)
        device = self.backend.device
        return self.top(logits, on_device(words, device), noised.on(device), k, probs)

    def asked(self, rows: Sequence[Row], depths: Sequence[int]) -> Asked:
        """What `top` has to know of paths: their requests and lengths."""
        top_next = self.backend.top_next
        assert top_next is not None, "`stays_on_device` says whether it is supported"
        hot = [row.distribution.temperature > 0 for row in rows]
        keys = [self._key(row, depth) if noised else 0 for row, depth, noised in zip(rows, depths, hot)]
        words = top_next.asked([row.distribution for row in rows], keys, self.vocabulary)
        return Asked(words, Numbers.of(hot, len(hot)), not all(hot))

    def top(self, logits: Tensor, words: Any, noised: Tensor, k: int, probs: bool) -> tuple[Tensor, Tensor]:
        """`next_tokens` for what `asked` returned, on the device; probs: False if all of it has noise."""
        top_next, logits = self.backend.top_next, self._cut(logits)
        assert top_next is not None
        some, rest = max(1, AT_ONCE // logits.shape[1]), (k, self.ids_on_device, probs)
        parts = [slice(first, first + some) for first in range(0, len(logits), some)]
        found = [top_next(logits[part], words[part], *rest) for part in parts]
        tokens, shares = found[0] if len(found) == 1 else map(torch.cat, zip(*found))
        none = tokens < 0
        if self.ids_on_device is not None:
            tokens = self.ids_on_device[tokens.clamp_min(0)].long()
        shares = torch.where(noised[:, None] > 0, self.ranks_on_device[: tokens.shape[1]], shares)
        return tokens.masked_fill(none, -1), shares.masked_fill(none, 0.0)

    def stays_on_device(self, rows: Iterable[Row]) -> bool:
        """Whether drafts of these rows can be chosen where the logits are, and tokens not be read."""
        return self.backend.top_next is not None and not any(row.processors for row in rows)

    def widen(
        self, candidates: Candidates, row: Row, paths: Sequence[Sequence[int]], logits: Tensor
    ) -> tuple[list[int], list[int]]:
        """The next level of a dynamic tree, after paths of one length: the parents' rows and the tokens."""
        if row.processors:
            return candidates.widen(self.found(row, paths, logits, candidates.k))
        noised = row.distribution.temperature > 0
        key = self._key(row, len(paths[0])) if noised else 0
        ranked = self.rank_confidence if noised else None
        return candidates.grow(self._cut(logits), row.distribution, key, self.ids, ranked)

    def distribution(self, row: Row, path: Sequence[int], logits: Tensor) -> Tensor | None:
        """q after a path, float64 [V] over the target's tokens, from float32 [Vd]; None if it is invalid."""
        return self.sampler.q(row, path, self.wide(logits[None])[0])

    def wide(self, logits: Tensor) -> Tensor:
        """[n, V] over the target's tokens: -inf for those outside the head's vocabulary."""
        if self.ids is None and logits.shape[1] >= self.vocabulary:
            return self._cut(logits)
        out = logits.new_full((len(logits), self.vocabulary), float("-inf"))
        if self.ids is None:
            out[:, : logits.shape[1]] = logits
        else:
            out[:, self.ids.long().to(out.device)] = logits
        return out

    @staticmethod
    def _key(row: Row, depth: int) -> int:
        """The noise key of the position after a path of this length."""
        return key_in(row.stream, len(row.tokens) + depth)

    def _cut(self, logits: Tensor) -> Tensor:
        """Logits without the padding of the vocabulary."""
        padded = self.ids is None and logits.shape[1] > self.vocabulary
        return logits[:, : self.vocabulary] if padded else logits

    def _path_by_path(
        self, row: Row, paths: Sequence[Sequence[int]], logits: Tensor, k: int
    ) -> tuple[Tensor, Tensor]:
        """The best tokens where logits processors need the text before each."""
        tokens, shares = torch.full((len(paths), k), -1, dtype=torch.int32), torch.zeros(len(paths), k)
        for i, path in enumerate(paths):
            best, probs = self.sampler.top(row, path, logits, k, True, i)
            tokens[i, : len(best)] = torch.tensor(best, dtype=torch.int32)
            shares[i, : len(best)] = torch.tensor(probs)
        return tokens, shares
