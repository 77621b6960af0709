"""Candidates of a dynamic draft tree by tree.c."""

from __future__ import annotations

import ctypes
from array import array
from ctypes import POINTER, c_double, c_float, c_long, c_uint64, c_void_p
from typing import Any

from torch import Tensor

from outrider.backends.candidates import Found, Nodes
from outrider.backends.cpu.structs import address
from outrider.core.params import DistributionParams


class Tree(ctypes.Structure):
    """`Tree` of tree.c."""

    _fields_ = [
        ("wide", c_long),
        ("records", c_long),
        ("rows", c_long),
        ("scores", c_void_p),
        ("shares", c_void_p),
        ("tokens", c_void_p),
        ("above", c_void_p),
        ("front", c_void_p),
        ("order", c_void_p),
    ]


def declare(lib: ctypes.CDLL) -> None:
    """Set the signatures of tree.c."""
    tree: dict[str, Any] = {"tree": POINTER(Tree)}
    by_entry = {"ids": c_void_p, "ranked": c_void_p}
    sampling = {"temperature": c_float, "min_p": c_double, "top_k": c_long, "top_p": c_double}
    widen = tree | {"entries": c_void_p, "shares": c_void_p, "k": c_long} | by_entry | {"out": c_void_p}
    grow = tree | {"logits": c_void_p, "vocabulary": c_long} | sampling | {"key": c_uint64}
    grow |= by_entry | {"k": c_long, "out": c_void_p}
    keep = tree | {"nodes": c_long, "tokens": c_void_p, "parents": c_void_p, "shares": c_void_p}
    for function, arguments in ((lib.widen, widen), (lib.grow, grow), (lib.keep, keep)):
        function.argtypes, function.restype = [*arguments.values()], c_long


class Compiled:
    """`Candidates` by tree.c: one array for each field of a record."""

    def __init__(self, lib: ctypes.CDLL, k: int, wide: int, levels: int) -> None:
        assert k <= 64
        records = k * (1 + (levels - 1) * wide)
        self.lib, self.k, self.wide = lib, k, wide
        self.scores, self.shares = array("d", bytes(8 * records)), array("f", bytes(4 * records))
        self.tokens, self.above, self.order = (array("i", bytes(4 * records)) for _ in range(3))
        self.front = array("i", bytes(4 * wide))
        self.front[0] = -1  # the root
        self.out = array("i", bytes(8 * wide))  # [2, wide]: parents, tokens
        fields: tuple[array[Any], ...] = (
            self.scores,
            self.shares,
            self.tokens,
            self.above,
            self.front,
            self.order,
        )
        self.tree = Tree(wide, 0, 1, *map(_address, fields))

    def widen(self, found: Found) -> tuple[list[int], list[int]]:
        entries, shares, ids, ranked = found
        k, out = entries.shape[1], _address(self.out)
        by_entry = address(ids), address(ranked)
        return self._front(
            self.lib.widen(self.tree, entries.data_ptr(), shares.data_ptr(), k, *by_entry, out)
        )

    def grow(
        self,
        logits: Tensor,
        distribution: DistributionParams,
        key: int,
        ids: Tensor | None,
        ranked: Tensor | None,
    ) -> tuple[list[int], list[int]]:
        logits = logits.contiguous()
        vocabulary, out = logits.shape[1], _address(self.out)
        by_entry, k = (address(ids), address(ranked)), min(self.k, vocabulary)
        return self._front(
            self.lib.grow(self.tree, logits.data_ptr(), vocabulary, *distribution, key, *by_entry, k, out)
        )

    def _front(self, count: int) -> tuple[list[int], list[int]]:
        """Parents and tokens of the nodes that are expanded next."""
        return self.out[:count].tolist(), self.out[self.wide : self.wide + count].tolist()

    def keep(self, nodes: int) -> Nodes:
        tokens, parents = array("i", bytes(4 * nodes)), array("i", bytes(4 * nodes))
        shares = array("f", bytes(4 * nodes))
        count = self.lib.keep(self.tree, nodes, _address(tokens), _address(parents), _address(shares))
        return tokens[:count].tolist(), parents[:count].tolist(), shares[:count].tolist()


def _address(numbers: array[Any]) -> int:
    return numbers.buffer_info()[0]
