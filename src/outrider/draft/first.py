"""Several methods, one after the other: a row is guessed for by the first that has something to say.

The cheap and certain ones stand in front (a look-up), the one that always knows something at the end (a model, a table).
"""

from __future__ import annotations

from dataclasses import dataclass

from outrider.draft.union import Union
from outrider.types import NOTHING, Batch, Budget, Draft, Guesses


class First(Union):
    @dataclass(frozen=True)
    class Options(Union.Options):
        """drafters: as in `union`, the most trusted first."""

    def size(self, depth: int) -> int:
        return max(self.sizes(depth))

    def propose(self, batch: Batch, budgets: list[Budget]) -> Draft:
        """All are asked in every step, with a budget of nothing where a row has been served: those with K/V must keep up."""
        self.drafts, open_ = [], list(budgets)
        chosen: list[Guesses] = [NOTHING] * len(batch)
        for i in range(len(self.drafters)):
            self.drafts.append(self.ask(i, batch, open_))
            for r, tree in enumerate(self.drafts[i].trees):
                if tree.tokens and open_[r].nodes:
                    chosen[r], open_[r] = tree, Budget()
        return Draft(chosen)
