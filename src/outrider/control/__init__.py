"""How many tokens to draft, and how many prompt tokens to compute beside decoding rows."""

from __future__ import annotations

from typing import Any, Protocol

from outrider.core.clock import Times
from outrider.core.step import Batch, Commit
from outrider.core.tree import Budget


class Controller(Protocol):
    """Decides draft budgets.  Has no access to a model."""

    def budget(self, batch: Batch) -> list[Budget]:
        """An upper bound for every row; (0, 0) is plain decoding."""

    def trim(self, batch: Batch) -> None:
        """Cut every draft tree to an ancestor-closed part within its budget."""

    def nodes(self, rows: int) -> int:
        """The largest number of draft nodes that one of so many rows may get."""

    def likely(self, rows: int) -> int:
        """How many of them it is likely to get, for the share of a step that prompts leave to drafts."""

    def forced(self, r: int) -> bool:
        """Whether row r of the batch may get forced text, in place of what it was to be drafted."""

    def report(self) -> dict[str, Any]:
        """What was chosen and why, for people; empty if nothing is chosen."""

    def learn(self, commit: Commit, times: Times) -> None:
        """Take in the outcome and the seconds of a step."""
