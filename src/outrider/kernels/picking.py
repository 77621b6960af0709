"""Choosing tokens from logits by the C kernels (sample.c, stop.c)."""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Sequence

import torch
from torch import Tensor

from outrider.kernels import chain
from outrider.kernels.chain import TRAITS, Halt, Traits
from outrider.sampling.params import Law


def declare(lib: ctypes.CDLL) -> None:
    p, n, i, f, d, u = ctypes.c_void_p, ctypes.c_long, ctypes.c_int, ctypes.c_float, ctypes.c_double, ctypes.c_uint64
    lib.pick.argtypes = [p, n, f, d, n, d, u, n, p, p]
    lib.pick.restype = n
    lib.picks.argtypes = [p, n, n, f, d, n, d, p, p, n, p, p]
    lib.picks.restype = None
    lib.follow.argtypes, lib.follow.restype = [p, n, n, f, d, n, d, u, u, p, p, n, p, p], n
    lib.halts.argtypes = [ctypes.POINTER(chain.Rule), p, n, f, i, n, p]


class Picking:
    """These methods of `Kernels`; logits are float32 on the CPU."""

    def __init__(self, lib: ctypes.CDLL) -> None:
        self.lib = lib
        self._out = (ctypes.c_int32 * 64)()
        self._prob = (ctypes.c_float * 64)()

    def halts(self, halt: Halt, logits: Tensor, temperature: float, token: int, level: int, row: int = 0) -> tuple[bool, Traits]:
        at = logits.data_ptr() + (row * logits.stride(0) * 4 if row else 0)
        traits = (ctypes.c_float * TRAITS)()
        return bool(self.lib.halts(chain.Rule.of(halt), at, logits.shape[-1], temperature, token, level, traits)), traits[:]

    def pick(self, logits: Tensor, law: Law, key: int, k: int, probs: bool, row: int = 0) -> tuple[list[int], list[float]]:
        at = logits.data_ptr() + (row * logits.stride(0) * 4 if row else 0)  # the address: indexing a tensor costs far more
        count = self.lib.pick(
            at, logits.shape[-1], law.temperature, law.min_p, law.top_k, law.top_p, key, min(k, 64),
            self._out, self._prob if probs else None,
        )  # fmt: skip
        return self._out[:count], self._prob[:count] if probs else []

    def follow(
        self, logits: Tensor, law: Law, stream: int, position: int, tokens: Sequence[int], parents: Sequence[int], row: int
    ) -> tuple[list[int], list[int]] | None:
        size, wide = len(tokens), logits.stride(0)
        held = array("i", [*tokens, *parents[:size], *[0] * (2 * size + 1)])  # and room for the path and what is said
        at = held.buffer_info()[0]
        said = self.lib.follow(
            logits.data_ptr() + row * wide * 4, wide, logits.shape[1], law.temperature, law.min_p, law.top_k, law.top_p, stream, position,
            at, at + 4 * size, size, at + 8 * size, at + 12 * size,
        )  # fmt: skip
        return None if said < 0 else (held[2 * size : 2 * size + said - 1].tolist(), held[3 * size : 3 * size + said].tolist())

    def picks(
        self, logits: Tensor, law: Law, keys: Sequence[int], k: int, ids: Tensor | None = None, probs: bool = True
    ) -> tuple[Tensor, Tensor]:
        assert k <= 64
        (rows, size), held, logits = logits.shape, array("Q", keys), logits.contiguous()
        out, prob = torch.empty(rows, k, dtype=torch.int32), torch.zeros(rows, k)
        self.lib.picks(
            logits.data_ptr(), rows, size, law.temperature, law.min_p, law.top_k, law.top_p, held.buffer_info()[0],
            None if ids is None else ids.data_ptr(), k, out.data_ptr(), prob.data_ptr() if probs else None,
        )  # fmt: skip
        return out, prob
