"""Candidates of a dynamic draft tree by tree.c."""

from __future__ import annotations

import ctypes
from array import array
from typing import Any

from torch import Tensor

from outrider.backends.candidates import Nodes, Table, TopEntries
from outrider.backends.cpu.bindings import STRUCTS
from outrider.backends.cpu.structs import address
from outrider.core.params import DistributionParams


class Compiled:
    """`Candidates` by tree.c: one array for each field of a record."""

    def __init__(self, lib: ctypes.CDLL, k: int, wide: int, levels: int) -> None:
        assert k <= 64
        records = k * (1 + (levels - 1) * wide)
        self.lib, self.k, self.wide = lib, k, wide
        self.scores, self.confidences = array("d", bytes(8 * records)), array("f", bytes(4 * records))
        self.tokens, self.above, self.order = (array("i", bytes(4 * records)) for _ in range(3))
        self.front = array("i", bytes(4 * wide))
        self.front[0] = -1  # the root
        self.out = array("i", bytes(8 * wide))  # [2, wide]: parents, tokens
        fields: list[array[Any]] = [self.scores, self.confidences, self.tokens, self.above]
        self.tree = STRUCTS["CandidateTree"](wide, 0, 1, *map(_address, [*fields, self.front, self.order]))

    def widen(self, found: TopEntries) -> tuple[list[int], list[int]]:
        entries, probs, ids, by_rank = found
        k, out = entries.shape[1], _address(self.out)
        by_entry = address(ids), address(by_rank)
        return self._front(self.lib.widen(self.tree, entries.data_ptr(), probs.data_ptr(), k, *by_entry, out))

    def grow(
        self, logits: Tensor, distribution: DistributionParams, key: int, ids: Table, by_rank: Table
    ) -> tuple[list[int], list[int]]:
        logits = logits.contiguous()
        vocabulary, out = logits.shape[1], _address(self.out)
        by_entry, k = (address(ids), address(by_rank)), min(self.k, vocabulary)
        return self._front(
            self.lib.grow(self.tree, logits.data_ptr(), vocabulary, *distribution, key, *by_entry, k, out)
        )

    def _front(self, count: int) -> tuple[list[int], list[int]]:
        """Parents and tokens of the nodes that are expanded next."""
        return self.out[:count].tolist(), self.out[self.wide : self.wide + count].tolist()

    def keep(self, nodes: int) -> Nodes:
        tokens, parents = array("i", bytes(4 * nodes)), array("i", bytes(4 * nodes))
        confidences = array("f", bytes(4 * nodes))
        count = self.lib.keep(self.tree, nodes, _address(tokens), _address(parents), _address(confidences))
        return tokens[:count].tolist(), parents[:count].tolist(), confidences[:count].tolist()


def _address(numbers: array[Any]) -> int:
    return numbers.buffer_info()[0]
