"""No draft tokens: plain decoding."""

from __future__ import annotations

from outrider.core.step import Batch
from outrider.core.tree import EMPTY_TREE, Draft
from outrider.core.validate import NoOptions
from outrider.drafting.base import Drafter


class Off(Drafter):
    depth = 0
    Options = NoOptions

    def propose(self, batch: Batch) -> Draft:
        return Draft([EMPTY_TREE] * len(batch))
