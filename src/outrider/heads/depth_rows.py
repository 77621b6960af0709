"""Rows of a loss over several depths of a network that drafts all tokens in one pass (P-EAGLE, PARD).

A row has an anchor a and a depth d.  Row (a, 0) is the text's place a; deeper ones are masks behind it:

    place             0      1      2      3            anchors 0 and 2, depths up to 2
    depth 0         (0,0)  (1,0)  (2,0)  (3,0)          at position a
    depth 1         (0,1)         (2,1)                 at position a + 1
    depth 2         (0,2)                               at position a + 2

Row (a, d) attends to the rows of depth 0 up to its anchor, and to those of its anchor up to itself, as in a
draft.  Every depth has a part of the anchors of the depth before.  So the rows that a row attends to are
never dropped, and deep rows, which cost as much and count less, are few.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor


class DepthRows(NamedTuple):
    """Anchors and depths of the rows, int64 [n]."""

    anchors: Tensor
    depths: Tensor

    @staticmethod
    def of(places: int, anchors: Tensor, shares: Iterable[float]) -> DepthRows:
        """All places at depth 0, then for each further depth this share of the anchors, the first ones.

        A row whose position would be no place is left out.
        """
        parts = [torch.arange(places, device=anchors.device)]
        for depth, share in enumerate(shares, 1):
            part = anchors[: int(len(anchors) * share)]
            parts.append(part[part + depth < places])
        depths = [torch.full_like(part, depth) for depth, part in enumerate(parts)]
        return DepthRows(torch.cat(parts), torch.cat(depths))

    @property
    def attended(self) -> Tensor:
        """Whether each row attends to each other one, bool [n, n]."""
        text = (self.depths == 0) & (self.anchors <= self.anchors[:, None])
        own = (self.anchors == self.anchors[:, None]) & (self.depths <= self.depths[:, None])
        return text | own
