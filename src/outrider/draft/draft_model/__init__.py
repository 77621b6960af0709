"""A smaller language model guesses (Leviathan et al. 2023, arXiv 2211.17192; Chen et al. 2023, arXiv 2302.01318).

Its K/V lies at the target's slots, in a pool of its own, and covers committed tokens only: every step first catches up
with what became certain, in the forward that also gives the first level.

    position            … e-2   e-1 │  e    e+1       e = step.end: the known tokens end here
    forward 1 takes     known known │                 its last row says the guess for position e
    forward 2 takes                 │ guess           … for e+1; its K/V is scratch in the row's node slots

With `siblings` = k, a level keeps the k best of all children of the level before, by the product of estimates; under a rule that
judges guesses by their laws, k children are drawn from the draft's law instead (see tree.py).
"""

from __future__ import annotations

from outrider.draft.draft_model.drafter import ModelDrafter
from outrider.draft.draft_model.options import DraftModelOptions
from outrider.draft.draft_model.retokenize import Retokenized
from outrider.drafting.base import Drafter, Target
from outrider.drafting.view import SELF


class DraftModel(ModelDrafter):
    Options = DraftModelOptions

    @classmethod
    def create(cls, options: DraftModelOptions, target: Target) -> Drafter:
        """A drafter in the draft's own tokens where `options` ask for it."""
        if options.vocab_mismatch == "retokenize" and options.model != SELF:
            return Retokenized(options, target)
        return cls(options, target)
