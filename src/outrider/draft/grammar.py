"""Forced text: propose what the grammar of a row makes certain, such as `", "age": ` in JSON (jump-forward).

Only the text is certain: the target may split it into other tokens.  The draft tokens are those that the
tokenizer makes of it, and the target verifies them as it does every draft token.  Rows without a grammar get
none.
"""

from __future__ import annotations

from collections.abc import Sequence

from outrider.core.processor import Ids
from outrider.core.row import Row
from outrider.core.tree import EMPTY_TREE, Budget, DraftTree
from outrider.core.validate import NoOptions
from outrider.drafting.base import TextDrafter

CONFIDENCE = 0.95  # assumed acceptance of a token of forced text


class Grammar(TextDrafter):
    automatic = certain = True
    depth = 64
    Options = NoOptions

    def after(self, row: Row, ahead: Sequence[int], budget: Budget) -> DraftTree:
        if row.grammar is None:
            return EMPTY_TREE
        tokens = row.grammar.forced(Ids(row.tokens, ahead))[: budget.depth]
        return DraftTree.chain(tokens, [CONFIDENCE] * len(tokens))
