"""Choice of tokens from logits by the C kernels (sample.c, stop.c).  Logits are float32 on the CPU."""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Sequence

import torch
from torch import Tensor

from outrider.backends.cpu import structs
from outrider.backends.cpu.structs import address
from outrider.core.params import DistributionParams
from outrider.core.stop_rule import NUM_FEATURES, NodeFeatures, StopRule

MAX_K = 64  # tokens a pick


class Picking:
    """The part of the backend that picks tokens."""

    def __init__(self, lib: ctypes.CDLL) -> None:
        self.lib = lib
        self._tokens = (ctypes.c_int32 * MAX_K)()
        self._probs = (ctypes.c_float * MAX_K)()

    def pick(
        self, logits: Tensor, distribution: DistributionParams, key: int, k: int, probs: bool, row: int = 0
    ) -> tuple[list[int], list[float]]:
        probabilities = self._probs if probs else None
        count = self.lib.pick(
            _row(logits, row),
            logits.shape[-1],
            *distribution,
            key,
            min(k, MAX_K),
            self._tokens,
            probabilities,
        )
        return self._tokens[:count], self._probs[:count] if probs else []

    def pick_rows(
        self,
        logits: Tensor,
        distribution: DistributionParams,
        keys: Sequence[int],
        k: int,
        ids: Tensor | None = None,
        probs: bool = True,
    ) -> tuple[Tensor, Tensor]:
        assert k <= MAX_K
        (n, vocabulary), keys, logits = logits.shape, array("Q", keys), logits.contiguous()
        entries, probabilities = torch.empty(n, k, dtype=torch.int32), torch.zeros(n, k)
        picked = entries.data_ptr(), probabilities.data_ptr() if probs else None
        given = *distribution, keys.buffer_info()[0], address(ids), k
        self.lib.picks(logits.data_ptr(), n, vocabulary, *given, *picked)
        return entries, probabilities

    def should_stop(
        self, stop_rule: StopRule, logits: Tensor, temperature: float, token: int, depth: int, row: int = 0
    ) -> tuple[bool, NodeFeatures]:
        rule, features = structs.stop_rule(stop_rule), (ctypes.c_float * NUM_FEATURES)()
        at, vocabulary = _row(logits, row), logits.shape[-1]
        stops = self.lib.should_stop(rule, at, vocabulary, temperature, token, depth, features)
        return bool(stops), features[:]


def _row(logits: Tensor, row: int) -> int:
    """Address of a row of [V] or [M, V].  Indexing the tensor costs far more."""
    return logits.data_ptr() + (row * logits.stride(0) * 4 if row else 0)
