"""Rows of several texts, one text behind the other, and the same rows as a batch padded to the longest text.

lengths 3, 2                row      0 1 2 3 4          entry = L * text + number within the text
batch [B, L] of rows        text 0   0 1 2
                            text 1   3 4 ·              · repeats the last row, and is never visible
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from outrider.core.device import to_device


@dataclass(frozen=True)
class Ragged:
    """N rows of B texts, of which the longest has L.

    index: int64 [B, L], the row of each entry.  valid: bool [B, L], whether an entry is a row of its text.
    flat: int64 [N], the entry of each row in [B * L].  One text has no `index` and no `flat`: its rows are
    the batch.
    """

    count: int
    valid: Tensor
    index: Tensor | None = None
    flat: Tensor | None = None

    @staticmethod
    def of(lengths: Sequence[int], device: torch.device) -> Ragged:
        """The layout of texts with these numbers of rows, not all of which are 0."""
        sizes, numbers = torch.tensor(lengths), torch.arange(max(lengths))
        valid = numbers < sizes[:, None]
        if len(lengths) == 1:
            return Ragged(1, to_device(valid, device))
        ends = sizes.cumsum(0)[:, None]
        index = torch.minimum(ends - sizes[:, None] + numbers, (ends - 1).clamp_min(0))
        flat = valid.flatten().nonzero().flatten()
        return Ragged(len(lengths), *(to_device(part, device) for part in (valid, index, flat)))

    def entries(self, rows: Tensor) -> Tensor:
        """Entries [B, L, …] of rows [N, …]."""
        return rows[None] if self.index is None else self._taken(rows, 0)

    def rows(self, entries: Tensor) -> Tensor:
        """Rows [N, …] of entries [B, L, …]."""
        return entries[0] if self.flat is None else entries.flatten(0, 1).index_select(0, self.flat)

    def pad(self, heads: Tensor) -> Tensor:
        """Entries [B, heads, L, width] of the heads of rows, [heads, N, width]."""
        return heads[None] if self.index is None else self._taken(heads, 1).transpose(0, 1)

    def _taken(self, x: Tensor, dim: int) -> Tensor:
        """The entries of the rows that lie along `dim`.  `index_select` has a fast gradient."""
        assert self.index is not None
        taken = x.index_select(dim, self.index.flatten())
        return taken.reshape(*x.shape[:dim], *self.index.shape, *x.shape[dim + 1 :])

    def join(self, heads: Tensor) -> Tensor:
        """Rows [N, heads * width] of entries [B, heads, L, width]."""
        return self.rows(heads.transpose(1, 2).flatten(2))
