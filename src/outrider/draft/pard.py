"""PARD (arXiv 2504.18583): a draft model that drafts all tokens in one forward, with mask tokens.

All of it is that of a draft model with `parallel_drafting`: draft_model/one_pass.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

from outrider.core.validate import Kind
from outrider.draft.draft_model import DraftModel
from outrider.draft.draft_model.options import DraftModelOptions
from outrider.drafting.base import Drafter, Target

ALWAYS = Kind("True, or left out", lambda value: value is True)


class Pard(DraftModel):
    demo: ClassVar = {}

    @dataclass(frozen=True)
    class Options(DraftModelOptions):
        """As of a draft model; only parallel_drafting is always on."""

        parallel_drafting: Annotated[bool, ALWAYS] = True

    @classmethod
    def example(cls, target: Target) -> Drafter:
        """The target as its own draft model, with its last token as mask and two siblings."""
        mask = target.vocabulary - 1
        return cls(cls.Options(model=target.checkpoint.name, siblings=2, mask_token_id=mask), target)
