"""The sampler: one row of logits at one node becomes a token.  Plain decoding, verification and drafting all come here."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from outrider.errors import ModelError
from outrider.kernels import Kernels
from outrider.sampling.noise import key_of

if TYPE_CHECKING:
    from outrider.types import Row


class Sampler:
    """Applies a request's processors, its law and the noise of the position.  Has no state."""

    def __init__(self, kernels: Kernels) -> None:
        self.kernels = kernels

    def pick(self, row: Row, path: Sequence[int], logits: Tensor, at: int = 0) -> int:
        """The token after the row's tokens and `path`; logits float32 [V], or [M,V] of which row `at` counts."""
        tokens, _ = self._pick(row, path, logits, at, 1, False)
        if not tokens:
            raise ModelError("no token has a finite logit: the weights or the activations of the model overflow (try another dtype).")
        return tokens[0]

    def top(self, row: Row, path: Sequence[int], logits: Tensor, k: int, probs: bool = True, at: int = 0) -> tuple[list[int], list[float]]:
        """The k <= 64 best tokens there, best first, and (if asked for) their probabilities: what a drafter guesses with logits of its own.

        With the request's own noise, so that a draft law near the target's law picks the target's token (arXiv 2408.07978).
        """
        return self._pick(row, path, logits, at, k, probs)

    def _pick(self, row: Row, path: Sequence[int], logits: Tensor, at: int, k: int, probs: bool) -> tuple[list[int], list[float]]:
        position = len(row.tokens) + len(path)
        if row.processors and any(processor.active(position) for processor in row.processors):
            logits, at = logits if logits.dim() == 1 else logits[at], 0
            ids = [*row.tokens, *path]
            for processor in row.processors:
                logits = processor(ids, logits)
        key = 0 if row.law.temperature == 0 else key_of(row.seed, row.index, position)
        return self.kernels.pick(logits, row.law, key, k, probs, at)
