"""Choosing tokens from logits by the C kernels (sample.c, stop.c)."""

from __future__ import annotations

import ctypes
import struct
from array import array
from collections.abc import Sequence

import torch
from torch import Tensor

from outrider.backends.base import Answer
from outrider.backends.cpu import chain
from outrider.core.params import DistributionParams
from outrider.core.stop_rule import NUM_FEATURES, NodeFeatures, StopRule

ASK = struct.Struct(
    "@llll dd QQ f4x"
)  # Ask of simd.h: at, root, nodes, top_k; min_p, top_p; stream, position; temperature


def declare(lib: ctypes.CDLL) -> None:
    p, n, i, f, d, u = (
        ctypes.c_void_p,
        ctypes.c_long,
        ctypes.c_int,
        ctypes.c_float,
        ctypes.c_double,
        ctypes.c_uint64,
    )
    lib.pick.argtypes = [p, n, f, d, n, d, u, n, p, p]
    lib.pick.restype = n
    lib.picks.argtypes = [p, n, n, f, d, n, d, p, p, n, p, p]
    lib.picks.restype = None
    lib.follow.argtypes, lib.follow.restype = [p, n, n, p, n, p, n, p], None
    lib.should_stop.argtypes = [ctypes.POINTER(chain.Rule), p, n, f, i, n, p]


class TreeQueries:
    """What `follow` in sample.c is asked, and where it puts what it finds."""

    __slots__ = ("asks", "held", "sizes")

    def __init__(self) -> None:
        self.asks, self.held = b"", array("i")
        self.sizes: dict[int, int] = {}

    def add(
        self,
        key: int,
        root: int,
        distribution: DistributionParams,
        stream: int,
        position: int,
        tokens: Sequence[int],
        parents: Sequence[int],
    ) -> None:
        temperature, min_p, top_k, top_p = distribution
        size = self.sizes[key] = len(tokens)
        self.asks += ASK.pack(len(self.held), root, size, top_k, min_p, top_p, stream, position, temperature)
        self.held.extend([*tokens, *parents[:size], *[0] * (2 * size + 2)])

    def read(self) -> dict[int, Answer | None]:
        found: dict[int, Answer | None] = {}
        ints, path = self.held.tolist(), 0
        for key, size in self.sizes.items():
            path += 2 * size
            said = path + size
            count = ints[said + size + 1]
            found[key] = None if count < 0 else (ints[path : path + count - 1], ints[said : said + count])
            path = said + size + 2
        return found


class Picking:
    """These methods of `Backend`; logits are float32 on the CPU."""

    def __init__(self, lib: ctypes.CDLL) -> None:
        self.lib = lib
        self._out = (ctypes.c_int32 * 64)()
        self._prob = (ctypes.c_float * 64)()

    def should_stop(
        self, stop_rule: StopRule, logits: Tensor, temperature: float, token: int, level: int, row: int = 0
    ) -> tuple[bool, NodeFeatures]:
        at = logits.data_ptr() + (row * logits.stride(0) * 4 if row else 0)
        features = (ctypes.c_float * NUM_FEATURES)()
        return bool(
            self.lib.should_stop(
                chain.Rule.of(stop_rule), at, logits.shape[-1], temperature, token, level, features
            )
        ), features[:]

    def pick(
        self, logits: Tensor, distribution: DistributionParams, key: int, k: int, probs: bool, row: int = 0
    ) -> tuple[list[int], list[float]]:
        at = logits.data_ptr() + (
            row * logits.stride(0) * 4 if row else 0
        )  # the address: indexing a tensor costs far more
        count = self.lib.pick(
            at, logits.shape[-1], distribution.temperature, distribution.min_p, distribution.top_k, distribution.top_p, key, min(k, 64),
            self._out, self._prob if probs else None,
        )  # fmt: skip
        return self._out[:count], self._prob[:count] if probs else []

    def trees(self) -> TreeQueries:
        return TreeQueries()

    def follow(self, logits: Tensor, trees: TreeQueries) -> None:
        self.lib.follow(
            logits.data_ptr(),
            logits.stride(0),
            logits.shape[1],
            None,
            0,
            trees.asks,
            len(trees.sizes),
            trees.held.buffer_info()[0],
        )

    def picks(
        self,
        logits: Tensor,
        distribution: DistributionParams,
        keys: Sequence[int],
        k: int,
        ids: Tensor | None = None,
        probs: bool = True,
    ) -> tuple[Tensor, Tensor]:
        assert k <= 64
        (rows, size), held, logits = logits.shape, array("Q", keys), logits.contiguous()
        out, prob = torch.empty(rows, k, dtype=torch.int32), torch.zeros(rows, k)
        self.lib.picks(
            logits.data_ptr(), rows, size, distribution.temperature, distribution.min_p, distribution.top_k, distribution.top_p, held.buffer_info()[0],
            None if ids is None else ids.data_ptr(), k, out.data_ptr(), prob.data_ptr() if probs else None,
        )  # fmt: skip
        return out, prob
