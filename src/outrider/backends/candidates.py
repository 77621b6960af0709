"""Candidate nodes of a growing dynamic draft tree: the interface, and the reference in Python."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple, Protocol

from torch import Tensor

from outrider.core.params import DistributionParams

TINY = 1e-30

Table = Tensor | None  # [V]: token of each entry; [k]: confidence of each rank; None: those of the entry
Picks = Callable[..., tuple[Tensor, Tensor]]
# tokens, the nodes of their parents (-1 after the root), confidences
Nodes = tuple[list[int], list[int], list[float]]


class TopEntries(NamedTuple):
    """The best entries of a vocabulary after n paths, best first.

    entries: int32 [n, k], padded with -1
    probs:   float32 [n, k], their probabilities
    ids:     int32 [V], token of each entry; None if the entries are tokens
    by_rank: float32 [k], confidence of each rank, in place of `probs`
    """

    entries: Tensor
    probs: Tensor
    ids: Table = None
    by_rank: Table = None

    def read(self) -> tuple[Tensor, Tensor]:
        """Tokens int64 [n, k], and confidences, 0 for padding."""
        none, tokens, confidences = self.entries < 0, self.entries, self.probs
        if self.ids is not None:
            tokens = self.ids[tokens.clamp_min(0)].masked_fill(none, -1)
        if self.by_rank is not None:
            confidences = self.by_rank[: tokens.shape[1]].expand_as(confidences)
        return tokens.long(), confidences.masked_fill(none, 0.0)


class Candidates(Protocol):
    """All candidate nodes found for one tree.  k: candidates per node."""

    k: int

    def widen(self, found: TopEntries) -> tuple[list[int], list[int]]:
        """Record the candidates after the nodes of the last forward (first: the root), and expand the best.

        Returns the parent, as an index into those nodes, and the token of every node to expand.  Nodes are
        ordered by joint probability; of equals the first is taken.
        """

    def grow(
        self, logits: Tensor, distribution: DistributionParams, key: int, ids: Table, by_rank: Table
    ) -> tuple[list[int], list[int]]:
        """`widen` by the best entries of logits float32 [n, V], as `Backend.pick_rows` finds them.

        All rows have the same key.  ids, by_rank: as in `TopEntries`.
        """

    def keep(self, nodes: int) -> Nodes:
        """The likeliest of all recorded nodes, parents first."""


class Record(NamedTuple):
    """A candidate node.  score: log of the joint probability; -inf: padding.  parent: its record, or -1."""

    token: int
    confidence: float
    score: float
    parent: int


class Plain:
    """Reference implementation in Python.  picks: the backend's picker.

    front: records of the nodes of the last forward, -1 for the root.
    """

    def __init__(self, picks: Picks, k: int, wide: int) -> None:
        self.picks, self.k, self.wide = picks, k, wide
        self.records: list[Record] = []
        self.front = [-1]

    def widen(self, found: TopEntries) -> tuple[list[int], list[int]]:
        first, k = len(self.records), found.entries.shape[1]
        tokens_of, confidences_of = found.read()
        for parent, tokens, confidences in zip(self.front, tokens_of.tolist(), confidences_of.tolist()):
            joint = 0.0 if parent < 0 else self.records[parent].score
            for token, confidence in zip(tokens, confidences):
                score = math.log(max(confidence, TINY)) + joint if token >= 0 else -math.inf
                self.records.append(Record(token, confidence, score, parent))
        self.front = self._likeliest(first, self.wide)
        parents = [(at - first) // k for at in self.front]
        return parents, [self.records[at].token for at in self.front]

    def grow(
        self, logits: Tensor, distribution: DistributionParams, key: int, ids: Table, by_rank: Table
    ) -> tuple[list[int], list[int]]:
        found = self.picks(
            logits, distribution, [key] * len(logits), min(self.k, logits.shape[1]), ids, by_rank is None
        )
        return self.widen(TopEntries(*found, ids, by_rank))

    def keep(self, nodes: int) -> Nodes:
        node_of = {at: node for node, at in enumerate(sorted(self._likeliest(0, nodes)))}
        kept = [self.records[at] for at in node_of]
        parents = [node_of.get(record.parent, -1) for record in kept]
        return [record.token for record in kept], parents, [record.confidence for record in kept]

    def _likeliest(self, first: int, most: int) -> list[int]:
        """Numbers of the records with the highest scores from `first` on, best first."""
        likely = [at for at in range(first, len(self.records)) if self.records[at].score > -math.inf]
        return sorted(likely, key=lambda at: -self.records[at].score)[:most]
