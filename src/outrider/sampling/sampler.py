"""Sampler of decoding, verification and drafting: picks a token from a row of logits."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from outrider.backends.base import Backend
from outrider.backends.torch.sampling import filtered, probabilities
from outrider.core.noise import key_in
from outrider.core.params import DistributionParams
from outrider.core.processor import Ids
from outrider.core.row import Row
from outrider.core.stop_rule import NUM_FEATURES, NodeFeatures, StopRule
from outrider.errors import ModelError, OutriderError, RequestError
from outrider.sampling import random_streams

GREEDY = DistributionParams(temperature=0.0)


class Sampler:
    """Stateless application of a request's logits processors, sampling distribution and noise."""

    def __init__(self, backend: Backend) -> None:
        self.backend = backend

    def pick(self, row: Row, path: Sequence[int], logits: Tensor, at: int = 0) -> int:
        """Pick the token after the row's tokens and `path`.

        logits: float32 [V], or [M, V] of which row `at` is used.
        Raises RequestError if the request masks every token, ModelError if no logit is finite.
        """
        tokens = self._pick(row, path, logits, at, 1, False)[0]
        if tokens:
            return tokens[0]
        raise self._no_token(row, logits, at)

    def distribution(self, row: Row, path: Sequence[int], logits: Tensor, at: int = 0) -> Tensor:
        """The distribution that `pick` samples from, float64 [V] on the CPU.  Raises as `pick` does."""
        edited, edited_at = self._with_processors(row, path, logits, at)
        if (ops := self.backend.distributions) is not None:
            probs = ops.probabilities(edited, row.distribution, edited_at)
        else:
            probs = probabilities(_row_of(edited, edited_at), row.distribution)
        if probs is None:
            raise self._no_token(row, logits, at)
        return probs

    def q(self, row: Row, path: Sequence[int], logits: Tensor, at: int = 0) -> Tensor | None:
        """`distribution` of draft logits; None if it is invalid: the target's own raises the same error."""
        try:
            return self.distribution(row, path, logits, at)
        except OutriderError:
            return None

    def children(self, row: Row, distribution: Tensor, nodes: range, repeats: bool = False) -> list[int]:
        """`random_streams.children`, by the backend if it supports it."""
        if (ops := self.backend.distributions) is None:
            return random_streams.children(row, distribution, nodes, repeats)
        return ops.sample(distribution, row.stream, len(row.tokens), nodes, repeats)

    def _no_token(self, row: Row, logits: Tensor, at: int) -> OutriderError:
        """Error for a position without a valid token."""
        if row.processors and _row_of(logits, at).isfinite().any():
            return RequestError(
                "the request forbids every token: see its allowed_token_ids, bad_words, logit_bias, "
                "min_tokens, logits_processors, structured_outputs and thinking_token_budget."
            )
        return ModelError(
            "no token has a finite logit: the weights or the activations of the model overflow "
            "(try another dtype)."
        )

    def top(
        self, row: Row, path: Sequence[int], logits: Tensor, k: int, probs: bool = True, at: int = 0
    ) -> tuple[list[int], list[float]]:
        """The k <= 64 best tokens of draft logits, best first, and their probabilities if `probs`.

        Uses the request's own noise, so a draft distribution near the target's picks the target's token
        (arXiv 2408.07978).  Returns empty lists if a user processor fails.
        """
        try:
            return self._pick(row, path, logits, at, k, probs)
        except RequestError:  # a user processor failed; the target's own pick will raise the same error
            return [], []

    def best(self, logits: Tensor, k: int) -> list[list[int]]:
        """The k <= 64 ids with the largest finite raw logits in each row of [M, V], best first.

        No ids if the largest one of the row is not finite.
        """
        if logits.device.type == "cpu":  # takes a third of the time of topk
            return [self.backend.pick(logits, GREEDY, 0, k, False, at)[0] for at in range(len(logits))]
        return _best_by_topk(logits, k)

    @staticmethod
    def logits_of(logits: Tensor, ids: Sequence[list[int]]) -> list[list[float]]:
        """The logits of these ids in each row of [M, V]."""
        if logits.device.type == "cpu":
            return [row[own].tolist() for row, own in zip(logits, ids)]
        width = max(map(len, ids), default=0)
        padded = torch.tensor([own + [0] * (width - len(own)) for own in ids], device=logits.device)
        found = logits.gather(1, padded.long()).tolist()
        return [row[: len(own)] for row, own in zip(found, ids)]

    def values(self, row: Row, path: Sequence[int], logits: Tensor, mode: str) -> Tensor:
        """Values reported as log-probabilities, float32 [V], from raw logits [V].

        mode: raw or processed logits, or the log-softmax of either (see `logprobs.MODES`).
        """
        if mode.startswith("processed"):
            logits = filtered(self._edited(row, path, logits, 0), row.distribution)
        return logits.log_softmax(-1) if mode.endswith("logprobs") else logits

    def should_stop(
        self, row: Row, path: Sequence[int], logits: Tensor, token: int, stop_rule: StopRule, at: int = 0
    ) -> tuple[bool, NodeFeatures]:
        """(whether a draft ends after `token`, the child of `path`; features of the node)."""
        try:
            logits, at = self._with_processors(row, path, logits, at)
        except RequestError:  # as in `top`
            return True, [0.0] * NUM_FEATURES
        return self.backend.should_stop(stop_rule, logits, row.distribution.temperature, token, len(path), at)

    def _pick(
        self, row: Row, path: Sequence[int], logits: Tensor, at: int, k: int, probs: bool
    ) -> tuple[list[int], list[float]]:
        if row.processors:
            logits, at = self._with_processors(row, path, logits, at)
        distribution = row.distribution
        key = key_in(row.stream, len(row.tokens) + len(path)) if distribution.temperature else 0
        return self.backend.pick(logits, distribution, key, k, probs, at)

    def _with_processors(self, row: Row, path: Sequence[int], logits: Tensor, at: int) -> tuple[Tensor, int]:
        """Logits and the row of them to use: as given, or edited [V] if a processor is active."""
        if any(processor.active(len(row.tokens) + len(path)) for processor in row.processors):
            return self._edited(row, path, logits, at), 0
        return logits, at

    def _edited(self, row: Row, path: Sequence[int], logits: Tensor, at: int) -> Tensor:
        """Logits of row `at` after all active processors, float32 [V]."""
        logits, ids = _row_of(logits, at), Ids(row.tokens, path)
        for processor in row.processors:
            if processor.active(len(ids)):
                logits = processor(ids, logits)
        return logits


def _row_of(logits: Tensor, at: int) -> Tensor:
    """Row `at` of logits [M, V], or logits [V] themselves."""
    return logits if logits.dim() == 1 else logits[at]


def _best_by_topk(logits: Tensor, k: int) -> list[list[int]]:
    """`Sampler.best` in one read."""
    values, ids = logits.topk(min(k, logits.shape[1]))
    finite = values.isfinite()
    found = ids.masked_fill(~(finite & finite[:, :1]), -1).tolist()
    return [[token for token in row if token >= 0] for row in found]
