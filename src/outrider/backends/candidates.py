"""Candidates of a dynamic draft tree while it grows: the interface, and the reference in Python."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple, Protocol

from torch import Tensor

from outrider.core.params import DistributionParams

TINY = 1e-30

Picks = Callable[..., tuple[Tensor, Tensor]]
Nodes = tuple[
    list[int], list[int], list[float]
]  # tokens, the nodes of their parents (-1 behind the root), shares


class Found(NamedTuple):
    """The best entries behind some paths, int32 [n, k], best first, -1 where there are fewer, and how likely each is, float32 [n, k].

    ids: int32, the token of each entry, None where they are the same.  ranked: float32, what counts as a share by rank, if not `shares`.
    """

    entries: Tensor
    shares: Tensor
    ids: Tensor | None = None
    ranked: Tensor | None = None

    def read(self) -> tuple[Tensor, Tensor]:
        """int64 [n, k] tokens, and shares, 0 where there is none."""
        none = self.entries < 0
        tokens = (
            self.entries.long()
            if self.ids is None
            else self.ids[self.entries.clamp_min(0)].long().masked_fill(none, -1)
        )
        shares = (
            self.shares
            if self.ranked is None
            else self.ranked[: self.entries.shape[1]].expand_as(self.shares)
        )
        return tokens, shares.masked_fill(none, 0.0)


class Candidates(Protocol):
    """Of one tree: a record for everything that was ever found.  k: so many are looked for behind a node."""

    k: int

    def widen(self, found: Found) -> tuple[list[int], list[int]]:
        """What was found behind the nodes that went through the head last, at first behind the root.  The likeliest of it goes on: which
        of these nodes each hangs from, and its token; the likeliest by joint probability, of equals the first."""

    def grow(
        self,
        logits: Tensor,
        distribution: DistributionParams,
        key: int,
        ids: Tensor | None,
        ranked: Tensor | None,
    ) -> tuple[list[int], list[int]]:
        """The same of the best that `Backend.pick_rows` finds in logits, float32 [n, V], where all have the same key.  ids, ranked: as in
        `Found`."""

    def keep(self, nodes: int) -> Nodes:
        """The likeliest of all records, parents first."""


class Plain:
    """The same in Python.  picks: the kernels'."""

    def __init__(self, picks: Picks, k: int, wide: int) -> None:
        self.picks, self.k, self.wide = picks, k, wide
        self.records: list[tuple[int, float, float, int]] = []  # token, share, score, record of the parent
        self.front = [-1]

    def widen(self, found: Found) -> tuple[list[int], list[int]]:
        first, k = len(self.records), found.entries.shape[1]
        for parent, tokens, shares in zip(self.front, *(part.tolist() for part in found.read())):
            joint = 0.0 if parent < 0 else self.records[parent][2]
            for token, share in zip(tokens, shares):
                score = math.log(max(share, TINY)) + joint if token >= 0 else -math.inf
                self.records.append((token, share, score, parent))
        self.front = self._likeliest(first, self.wide)
        return [(at - first) // k for at in self.front], [self.records[at][0] for at in self.front]

    def grow(
        self,
        logits: Tensor,
        distribution: DistributionParams,
        key: int,
        ids: Tensor | None,
        ranked: Tensor | None,
    ) -> tuple[list[int], list[int]]:
        found = self.picks(
            logits, distribution, [key] * len(logits), min(self.k, logits.shape[1]), ids, ranked is None
        )
        return self.widen(Found(*found, ids, ranked))

    def keep(self, nodes: int) -> Nodes:
        place = {at: node for node, at in enumerate(sorted(self._likeliest(0, nodes)))}
        kept = [self.records[at] for at in place]
        return [one[0] for one in kept], [place.get(one[3], -1) for one in kept], [one[1] for one in kept]

    def _likeliest(self, first: int, most: int) -> list[int]:
        likely = [at for at in range(first, len(self.records)) if self.records[at][2] > -math.inf]
        return sorted(likely, key=lambda at: -self.records[at][2])[:most]
