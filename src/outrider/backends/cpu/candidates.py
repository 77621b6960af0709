"""Candidates of a dynamic draft tree by tree.c."""

from __future__ import annotations

import ctypes
from array import array

from torch import Tensor

from outrider.backends.candidates import Found, Nodes
from outrider.core.params import DistributionParams


def declare(lib: ctypes.CDLL) -> None:
    p, n, d, tree = ctypes.c_void_p, ctypes.c_long, ctypes.c_double, ctypes.POINTER(_Tree)
    lib.widen.argtypes, lib.widen.restype = [tree, p, p, n, p, p, p], n
    lib.grow.argtypes, lib.grow.restype = (
        [tree, p, n, ctypes.c_float, d, n, d, ctypes.c_uint64, p, p, n, p],
        n,
    )
    lib.keep.argtypes, lib.keep.restype = [tree, n, p, p, p], n


class _Tree(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_long) for name in ("wide", "records", "rows")),
        *((name, ctypes.c_void_p) for name in ("scores", "shares", "tokens", "above", "front", "order")),
    ]


class Compiled:
    """By tree.c."""

    def __init__(self, lib: ctypes.CDLL, k: int, wide: int, levels: int) -> None:
        assert k <= 64
        most = k * (1 + (levels - 1) * wide)
        self.lib, self.k, self.wide = lib, k, wide
        self.scores, self.rest = array("d", bytes(8 * most)), array("i", bytes(4 * (4 * most + wide)))
        self.rest[4 * most] = -1  # the root
        self.out = array("i", bytes(8 * wide))
        self.out_at, at = self.out.buffer_info()[0], self.rest.buffer_info()[0]
        shares, tokens, above, order, front = range(at, at + 16 * most + 1, 4 * most)
        self.tree = _Tree(wide, 0, 1, self.scores.buffer_info()[0], shares, tokens, above, front, order)

    def widen(self, found: Found) -> tuple[list[int], list[int]]:
        entries, shares, ids, ranked = found
        count = self.lib.widen(
            self.tree, entries.data_ptr(), shares.data_ptr(), entries.shape[1], None if ids is None else ids.data_ptr(),
            None if ranked is None else ranked.data_ptr(), self.out_at,
        )  # fmt: skip
        return self._said(count)

    def grow(
        self,
        logits: Tensor,
        distribution: DistributionParams,
        key: int,
        ids: Tensor | None,
        ranked: Tensor | None,
    ) -> tuple[list[int], list[int]]:
        logits = logits.contiguous()
        return self._said(
            self.lib.grow(
                self.tree, logits.data_ptr(), logits.shape[1], distribution.temperature, distribution.min_p, distribution.top_k, distribution.top_p, key,
                None if ids is None else ids.data_ptr(), None if ranked is None else ranked.data_ptr(),
                min(self.k, logits.shape[1]), self.out_at,
            )
        )  # fmt: skip

    def _said(self, count: int) -> tuple[list[int], list[int]]:
        return self.out[:count].tolist(), self.out[self.wide : self.wide + count].tolist()

    def keep(self, nodes: int) -> Nodes:
        tokens, shares = array("i", bytes(8 * nodes)), array("f", bytes(4 * nodes))
        at = tokens.buffer_info()[0]
        count = self.lib.keep(self.tree, nodes, at, at + 4 * nodes, shares.buffer_info()[0])
        return tokens[:count].tolist(), tokens[nodes : nodes + count].tolist(), shares[:count].tolist()
