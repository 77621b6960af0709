"""No guesses: plain decoding."""

from __future__ import annotations

from dataclasses import dataclass

from outrider.draft.base import Drafter
from outrider.types import NOTHING, Batch, Budget, Draft


class Off(Drafter):
    depth = 0

    @dataclass(frozen=True)
    class Options:
        pass

    def propose(self, batch: Batch, budgets: list[Budget]) -> Draft:
        return Draft([NOTHING] * len(batch))
