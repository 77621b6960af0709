"""How much to guess."""

from __future__ import annotations

from typing import Protocol

from outrider.core.clock import Times
from outrider.core.types import Batch, Budget, Commit, Draft


class Controller(Protocol):
    """Pure bookkeeping, testable without a model."""

    def budget(self, batch: Batch) -> list[Budget]:
        """An upper bound a row; (0, 0) is plain decoding."""

    def trim(self, draft: Draft, budgets: list[Budget]) -> Draft:
        """An ancestor-closed part of the draft, within the budgets."""

    def nodes(self, rows: int) -> int:
        """The most guesses that one of so many rows may get."""

    def learn(self, commit: Commit, times: Times) -> None: ...
