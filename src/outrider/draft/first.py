"""Several drafters in a fixed order: a row gets the draft tokens of the first one that proposes any.

Cheap and precise drafters (look-ups) come first, those that always propose (a model, a table) last.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from outrider.control.plan import Arm
from outrider.core.step import Batch
from outrider.core.tree import NO_BUDGET, Draft
from outrider.draft.draft_model import DraftModel
from outrider.draft.ngram import Ngram
from outrider.draft.union import Union
from outrider.drafting.base import Drafter, Target


class First(Union):
    demo: ClassVar = {"suffix or recycling": {"drafters": [{"method": "suffix"}, {"method": "recycle"}]}}

    @dataclass(frozen=True)
    class Options(Union.Options):
        """drafters, nodes: as in `union`, the first one to be tried first."""

    @classmethod
    def example(cls, target: Target) -> Drafter:
        """A drafter that rarely proposes before one that is mostly right."""
        return cls(cls.Options(), target, [Ngram.example, DraftModel.example])

    def arms(self, depth: int) -> list[Arm]:
        return Drafter.arms(self, depth)

    def size(self, depth: int) -> int:
        return self._capped(max(self._sizes(depth)))

    def propose(self, batch: Batch) -> Draft:
        """Call all drafters in every step, since those with K/V must catch up.

        A row that has draft tokens has no budget left.  Probes are not draft tokens: the next drafter is
        used for the nodes that they leave.
        """
        drafts, left = list[Draft](), [step.budget for step in batch]
        for i in range(len(self.drafters)):
            drafts.append(self._ask(i, batch.within(left)))
            for r, tree in enumerate(drafts[i].trees):
                left[r] = NO_BUDGET if tree.size else left[r].within(nodes=left[r].nodes - tree.probes)
        return self._merge(batch, drafts)
