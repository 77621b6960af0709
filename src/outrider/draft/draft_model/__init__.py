"""A smaller language model drafts (Leviathan et al. 2023, arXiv 2211.17192; Chen et al. 2023, arXiv
2302.01318).

Its K/V is at the target's slots, in a pool of its own, and covers committed tokens only.  Every step first
catches up with the tokens that were committed since, in the forward that also gives the first draft token.

    position            … e-2   e-1 │  e    e+1          e = step.end, the number of known tokens
    forward 1 computes  known known │                    the logits of its last row give the draft token for e
    forward 2 computes              │ draft token        … for e+1; its K/V is scratch in the row's node slots

With `siblings` = k, each depth keeps the k best children of all nodes of the depth before, by the product of
their probabilities.  If the verification rule needs q, k children are sampled from it instead
(drafting/trees/sampled.py).
"""

from __future__ import annotations

from typing import ClassVar

from outrider.draft.draft_model.drafter import ModelDrafter
from outrider.draft.draft_model.options import DraftModelOptions
from outrider.draft.draft_model.retokenize import Retokenized
from outrider.draft.draft_model.retrieval import RetrievalDrafter
from outrider.drafting.base import DEPTHS, Drafter, Target
from outrider.drafting.view import SELF


class DraftModel(ModelDrafter):
    tunable: ClassVar = {**DEPTHS, "siblings": (2, 3), "assistant_confidence_threshold": (0.2, 0.4, 0.6)}
    Options = DraftModelOptions

    @classmethod
    def create(cls, options: DraftModelOptions, target: Target) -> Drafter:
        """A drafter in the draft model's own tokens if `vocab_mismatch` is "retokenize", or one that chooses
        pages."""
        if options.vocab_mismatch == "retokenize" and options.model != SELF:
            return Retokenized(options, target)
        if options.draft_kv_policy == "retrieval":
            return RetrievalDrafter(options, target)
        return cls(options, target)
