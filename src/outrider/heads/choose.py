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

from outrider.backends.candidates import Candidates, TopEntries
from outrider.backends.launch import on_device
from outrider.core.device import Numbers
from outrider.core.noise import key_in
from outrider.core.row import Row
from outrider.drafting.base import Target
from outrider.drafting.trees.builder import RANK_CONFIDENCE

RANKED_AT_ONCE = 1 << 24  # logits that `top` ranks in one call, which takes some ten times their memory


class RankingInputs(NamedTuple):
    """Inputs of `Chooser.top` beside the logits after n paths, on the host or on the device.

    words:      sampling parameters and noise keys, as `TopNext.asked` packs them
    noise_mask: int64 [n], 1 for paths of requests with a temperature: their logits get noise
    """

    words: Any
    noise_mask: Any


class Chooser:
    """Choice of draft tokens from a head's logits.

    ids: int32 [Vd], the target's token of each of the head's; None where they are the same.
    """

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
        return self.top_entries(row, paths, logits, k).read()

    def ranked(
        self, row: Row, paths: Sequence[Sequence[int]], logits: Tensor, k: int
    ) -> list[list[tuple[int, float]]]:
        """`best` as a list of (token, probability) for each path."""
        tokens, confidences = self.best(row, paths, logits, k)
        found = list[list[tuple[int, float]]]()
        for own_tokens, own_confidences in zip(tokens.tolist(), confidences.tolist()):
            pairs = zip(own_tokens, own_confidences)
            found.append([(token, confidence) for token, confidence in pairs if token >= 0])
        return found

    def top_entries(self, row: Row, paths: Sequence[Sequence[int]], logits: Tensor, k: int) -> TopEntries:
        """`best` as entries of the head's vocabulary."""
        k, has_noise = min(k, logits.shape[1]), row.distribution.temperature > 0
        by_rank = self.rank_confidence if has_noise else None
        if row.processors:
            return TopEntries(
                *self._path_by_path(row, paths, self.over_target_tokens(logits), k), by_rank=by_rank
            )
        keys = [0] * len(paths)
        if has_noise:
            keys_by_depth = {depth: self._key(row, depth) for depth in set(map(len, paths))}
            keys = [keys_by_depth[len(path)] for path in paths]
        logits = self._without_padding(logits)
        picks = self.backend.pick_rows(logits, row.distribution, keys, k, self.ids, not has_noise)
        return TopEntries(*picks, self.ids, by_rank)

    def next_tokens(
        self, rows: Sequence[Row], depths: Sequence[int], logits: Tensor, k: int
    ) -> tuple[Tensor, Tensor]:
        """`best` after paths of several rows, none with processors; the host reads nothing.

        rows, depths: of every path, and its length.
        Returns int64 and float32 [n, min(k, Vd)] on the device of the logits.
        """
        words, noise_mask = self.ranking_inputs(rows, depths)
        device = self.backend.device
        moved = RankingInputs(on_device(words, device), noise_mask.on(device))
        return self.top(logits, moved, k)

    def ranking_inputs(self, rows: Sequence[Row], depths: Sequence[int]) -> RankingInputs:
        """Inputs of `top` for paths of these requests and lengths, on the host."""
        top_next = self.backend.top_next
        assert top_next is not None, "`stays_on_device` says whether it is supported"
        has_noise = [row.distribution.temperature > 0 for row in rows]
        keys = [self._key(row, depth) if noise else 0 for row, depth, noise in zip(rows, depths, has_noise)]
        words = top_next.asked([row.distribution for row in rows], keys, self.vocabulary)
        return RankingInputs(words, Numbers.of(has_noise, len(has_noise)))

    def level_inputs(self, levels: Sequence[Sequence[Row]]) -> list[RankingInputs]:
        """`ranking_inputs` of each level, whose paths have as many tokens as there are levels above it.

        levels: the request of each path
        """
        top_next, made = self.backend.top_next, list[RankingInputs]()
        assert top_next is not None, "`stays_on_device` says whether it is supported"
        for depth, rows in enumerate(levels):
            if not made or rows != levels[depth - 1]:
                made.append(self.ranking_inputs(rows, [depth] * len(rows)))
                continue
            words, noise_mask = made[-1]  # of other keys
            if any(noise_mask.values):
                noises = zip(rows, noise_mask.values)
                keys = [self._key(row, depth) if noise else 0 for row, noise in noises]
                words = top_next.with_keys(words, keys)
            made.append(RankingInputs(words, noise_mask))
        return made

    def top(self, logits: Tensor, inputs: RankingInputs, k: int) -> tuple[Tensor, Tensor]:
        """`next_tokens` with inputs on the device, RANKED_AT_ONCE logits at a time."""
        top_next, logits = self.backend.top_next, self._without_padding(logits)
        assert top_next is not None
        entries, probs = list[Tensor](), list[Tensor]()
        step = max(1, RANKED_AT_ONCE // logits.shape[1])
        for first in range(0, len(logits), step):
            part = slice(first, first + step)
            best = top_next(logits[part], inputs.words[part], k, self.ids_on_device)
            entries.append(best[0])
            probs.append(best[1])
        tokens, confidences = _joined(entries), _joined(probs)
        missing = tokens < 0
        if self.ids_on_device is not None:
            tokens = self.ids_on_device[tokens.clamp_min(0)].long()
        by_rank = self.ranks_on_device[: tokens.shape[1]]
        confidences = torch.where(inputs.noise_mask[:, None] > 0, by_rank, confidences)
        return tokens.masked_fill(missing, -1), confidences.masked_fill(missing, 0.0)

    def stays_on_device(self, rows: Iterable[Row]) -> bool:
        """Whether drafts of these rows can be chosen where the logits are, and tokens not be read."""
        return self.backend.top_next is not None and not any(row.processors for row in rows)

    def widen(
        self, candidates: Candidates, row: Row, paths: Sequence[Sequence[int]], logits: Tensor
    ) -> tuple[list[int], list[int]]:
        """The next level of a dynamic tree, after paths of one length: the parents' rows and the tokens."""
        if row.processors:
            return candidates.widen(self.top_entries(row, paths, logits, candidates.k))
        has_noise = row.distribution.temperature > 0
        key = self._key(row, len(paths[0])) if has_noise else 0
        by_rank = self.rank_confidence if has_noise else None
        return candidates.grow(self._without_padding(logits), row.distribution, key, self.ids, by_rank)

    def distribution(self, row: Row, path: Sequence[int], logits: Tensor) -> Tensor | None:
        """q after a path, float64 [V] over the target's tokens, from float32 [Vd]; None if it is invalid."""
        return self.sampler.q(row, path, self.over_target_tokens(logits[None])[0])

    def over_target_tokens(self, logits: Tensor) -> Tensor:
        """[n, V] over the target's tokens: -inf for those outside the head's vocabulary."""
        if self.ids is None and logits.shape[1] >= self.vocabulary:
            return self._without_padding(logits)
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

    def _without_padding(self, logits: Tensor) -> Tensor:
        """Logits without the padding of the vocabulary."""
        padded = self.ids is None and logits.shape[1] > self.vocabulary
        return logits[:, : self.vocabulary] if padded else logits

    def _path_by_path(
        self, row: Row, paths: Sequence[Sequence[int]], logits: Tensor, k: int
    ) -> tuple[Tensor, Tensor]:
        """The best tokens where logits processors need the text before each."""
        tokens, confidences = torch.full((len(paths), k), -1, dtype=torch.int32), torch.zeros(len(paths), k)
        for i, path in enumerate(paths):
            best, probs = self.sampler.top(row, path, logits, k, True, i)
            tokens[i, : len(best)] = torch.tensor(best, dtype=torch.int32)
            confidences[i, : len(best)] = torch.tensor(probs)
        return tokens, confidences


def _joined(parts: Sequence[Tensor]) -> Tensor:
    """Rows of several tensors; a single one is not copied."""
    return parts[0] if len(parts) == 1 else torch.cat([*parts])
