"""Sampling distributions and the verification of draft trees by the C kernels (distribution.c, rules.c)."""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from outrider.backends.cpu.structs import packer
from outrider.backends.rules import Answer
from outrider.core.params import DistributionParams
from outrider.core.row import Row
from outrider.core.tree import DraftTree

RULES = {"match": 0, "rejection": 1, "block": 2, "traversal": 3}  # their numbers in kernels.h
QUERY = packer("TreeQuery")


class TreeQueries:
    """Trees for `verify_trees` of rules.c.

    `numbers` are those of all trees, and `data` the same for C, which writes its answers there.  For a tree
    of n nodes, from its `at` on:

        tokens [n] | parents [n] | index of the distribution of each, -1 without [n] |
        accepted nodes [n] | tokens to emit [n + 1] | their number, -1 without an answer
    """

    __slots__ = ("data", "distributions", "numbers", "probs", "queries", "rule", "sizes")

    def __init__(self, rule: str = "match") -> None:
        self.rule = RULES[rule]
        self.queries: list[bytes] = []
        self.numbers: list[int] = []
        self.data = array("i")
        self.sizes: dict[int, int] = {}  # key -> nodes
        self.distributions: list[Tensor] = []  # of sampled draft tokens; C reads them by address
        self.probs: list[array[int]] = []  # addresses of the distributions of each tree

    def add(self, key: int, row: Row, tree: DraftTree, root: int) -> None:
        temperature, min_p, top_k, top_p = row.distribution
        n = self.sizes[key] = len(tree.tokens) - tree.probes
        numbers, probs = self.numbers, self._probs_of(tree) if tree.distributions else 0
        where = len(numbers), root, n, top_k, self.rule, tree.repeats
        self.queries.append(QUERY.pack(*where, min_p, top_p, row.stream, len(row.tokens), probs, temperature))
        if n:
            numbers += tree.tokens[:n]
            numbers += tree.parents[:n]
            numbers += tree.probs_of[:n] or [-1] * n
        numbers += [0] * (2 * n + 2)

    def _probs_of(self, tree: DraftTree) -> int:
        """Address of the addresses of a tree's distributions."""
        own = [q.to("cpu", torch.float64).contiguous() for q in tree.distributions]
        self.distributions += own
        self.probs.append(array("Q", [q.data_ptr() for q in own]))
        return self.probs[-1].buffer_info()[0]

    def prepare(self) -> tuple[bytes, int, int]:
        """Allocate `data`; return the trees as rules.c and fused.c take them.

        To be called once, after the last tree: the kernels write their answers to this `data`.
        """
        self.data = array("i", self.numbers)
        return b"".join(self.queries), len(self.sizes), self.data.buffer_info()[0]

    def values(self, key: int, nodes: Sequence[int]) -> None:
        """Log-probabilities are found by the sampler."""

    def read(self) -> list[tuple[int, Answer | None]]:
        """(key, answer) of every tree; None where the kernels gave none."""
        found: list[tuple[int, Answer | None]] = []
        data, at = self.data.tolist(), 0
        for key, n in self.sizes.items():
            accepted, emitted = at + 3 * n, at + 4 * n
            at += 5 * n + 2
            count = data[at - 1]
            answer = data[accepted : accepted + count - 1], data[emitted : emitted + count]
            found.append((key, answer if count >= 0 else None))
        return found


class TreeVerifier:
    """Verification by rules.c."""

    rules: Collection[str] = RULES
    processes = False

    def __init__(self, lib: ctypes.CDLL) -> None:
        self.lib = lib

    def queries(self, rule: str) -> TreeQueries:
        return TreeQueries(rule)

    def verify(self, logits: Tensor, queries: TreeQueries) -> None:
        vocabulary = logits.shape[1]
        if wrong := [tuple(q.shape) for q in queries.distributions if q.shape != (vocabulary,)]:
            raise ValueError(f"a draft's sampling distribution has shape {wrong[0]}, not ({vocabulary},).")
        self.lib.verify_trees(logits.data_ptr(), logits.stride(0), vocabulary, None, 0, *queries.prepare())


class Distributions:
    """Sampling distributions by distribution.c."""

    def __init__(self, lib: ctypes.CDLL) -> None:
        self.lib = lib

    def probabilities(self, logits: Tensor, distribution: DistributionParams, row: int = 0) -> Tensor | None:
        vocabulary = logits.shape[-1]
        probs = torch.empty(vocabulary, dtype=torch.float64)
        at = logits.data_ptr() + (row * logits.stride(0) * 4 if row else 0)
        return probs if self.lib.probabilities(at, vocabulary, *distribution, probs.data_ptr()) else None

    def sample(self, probs: Tensor, stream: int, step: int, nodes: range, repeats: bool) -> list[int]:
        tokens = (ctypes.c_int32 * len(nodes))()
        count = self.lib.sample_children(
            probs.data_ptr(), len(probs), stream, step, nodes.start, len(nodes), repeats, tokens
        )
        return tokens[:count]
