"""Several methods, one after the other: a row is guessed for by the first that has something to say.

The cheap and certain ones stand in front (a look-up), the one that always knows something at the end (a model, a table).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from outrider.core.step import Batch
from outrider.core.tree import Budget, Draft
from outrider.draft.draft_model import DraftModel
from outrider.draft.ngram import Ngram
from outrider.draft.union import Union
from outrider.drafting.base import Drafter, Target


class First(Union):
    demo: ClassVar = {"suffix or recycling": {"drafters": [{"method": "suffix"}, {"method": "recycle"}]}}

    @dataclass(frozen=True)
    class Options(Union.Options):
        """drafters, nodes: as in `union`, the most trusted first."""

    @classmethod
    def example(cls, target: Target) -> Drafter:
        """One that is mostly silent, and one that is mostly right."""
        return cls(cls.Options(), target, [Ngram.example(target), DraftModel.example(target)])

    def size(self, depth: int) -> int:
        return min(max(self._sizes(depth)), self.options.nodes or 1 << 30)

    def propose(self, batch: Batch) -> Draft:
        """All are asked in every step, with a budget of nothing where a row has been served: those with K/V must keep up.  Probes
        are no guesses: the next one is asked, too, for the nodes that they leave."""
        self.drafts, left = [], [step.budget for step in batch]
        for i in range(len(self.drafters)):
            self.drafts.append(self._ask(i, batch.within(left)))
            for r, tree in enumerate(self.drafts[i].trees):
                left[r] = Budget() if tree.size else left[r].within(nodes=left[r].nodes - tree.probes)
        return self._merge(batch)
