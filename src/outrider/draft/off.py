"""No draft tokens: plain decoding."""

from __future__ import annotations

from dataclasses import dataclass

from outrider.core.step import Batch
from outrider.core.tree import EMPTY_TREE, Draft
from outrider.drafting.base import Drafter


class Off(Drafter):
    depth = 0

    @dataclass(frozen=True)
    class Options:
        pass

    def propose(self, batch: Batch) -> Draft:
        return Draft([EMPTY_TREE] * len(batch))
