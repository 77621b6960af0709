"""Retrieval from a corpus (REST, He et al. 2023, arXiv 2311.08252): propose what followed the last tokens in
a datastore.

`outrider datastore build` makes a datastore.  The longest match counts; its most frequent continuations
become a tree.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar

import numpy as np

from outrider.core.row import Row
from outrider.core.step import Commit
from outrider.core.tree import EMPTY_TREE, Budget, DraftTree
from outrider.core.validate import Checked, Kind, Share, whole
from outrider.draft.datastore.corpus import build
from outrider.draft.datastore.store import SPAN, Store, fingerprint
from outrider.drafting.base import Drafter, Target, TextDrafter
from outrider.drafting.matches import MatchAcceptance, TreeLimits, continuation_tree
from outrider.errors import ConfigError

# Places of a match that are read, evenly spaced.  REST reads 5000, but a continuation with a share of
# 0.1, the default minimum, is missing from 64 places in 0.1% of all cases only.
PLACES = 64
FILE = Kind("a file", lambda value: isinstance(value, str) and value != "")
Span = Annotated[int, whole(1, SPAN)]


class Datastore(TextDrafter):
    depth = 10
    demo: ClassVar = {"REST": {"datastore": "builtin-datastore"}}

    @dataclass(frozen=True)
    class Options(Checked):
        """Options under REST's names.

        datastore: a file, or "builtin-datastore".
        max_token_span, min_token_span: length of the longest and the shortest match.
        num_draft: maximum size of a tree; None means REST's 64, or 7 on a CPU, where every node costs time.
        min_token_prob: minimum joint probability of a node.
        """

        datastore: Annotated[str, FILE] | None = None
        max_token_span: Span = SPAN
        min_token_span: Span = 2
        num_draft: Annotated[int, whole(1, 1024)] | None = None
        min_token_prob: Share = 0.1

        def __post_init__(self) -> None:
            super().__post_init__()
            shorter = Kind(f"at most max_token_span ({self.max_token_span})", self.max_token_span.__ge__)
            shorter.check(self.min_token_span, "min_token_span")

    def __init__(self, options: Options, target: Target) -> None:
        super().__init__(options, target)
        if options.datastore is None:
            raise ConfigError(
                "the method needs a 'datastore': `outrider datastore build` makes one; the built-in target "
                "has 'builtin-datastore'."
            )
        self.store = Store(options.datastore)
        _check_vocabulary(self.store, options.datastore, target)
        self.nodes = target.nodes(options.num_draft, 64)
        self.memory = MatchAcceptance(SPAN, rate=0.05)  # of the corpus, over all requests
        self.lengths: dict[Row, int] = {}  # of the match that a row's last draft tokens came from

    @classmethod
    def example(cls, target: Target) -> Drafter:
        """A small random corpus that contains nearly every pair of tokens."""
        with tempfile.TemporaryDirectory() as folder:
            corpus, file = Path(folder) / "corpus.npy", str(Path(folder) / "store")
            np.save(corpus, np.random.default_rng(0).integers(0, target.vocabulary, 100_000))
            build([str(corpus)], file, target.checkpoint.tokenizer, target.vocabulary)
            options = cls.Options(datastore=file, min_token_span=1, min_token_prob=0.0, num_draft=12)
            return cls(options, target)

    def size(self, depth: int) -> int:
        return self.nodes if depth else 0

    def after(self, row: Row, ahead: Sequence[int], budget: Budget) -> DraftTree:
        options = self.options
        acceptance: MatchAcceptance = self.memory
        context = [*row.tokens[-options.max_token_span :], *ahead]
        shortest, longest = options.min_token_span, options.max_token_span
        length, texts = self.store.find(context, shortest, longest, PLACES, budget.depth)
        if length and acceptance(length) < options.min_token_prob:
            acceptance.skip(length, length)
            return EMPTY_TREE
        self.lengths[row] = length
        limits = TreeLimits(budget.depth, budget.nodes, self.nodes, options.min_token_prob)
        return continuation_tree(texts, acceptance, length, limits)[0]

    def observe(self, commit: Commit) -> None:
        for step in commit.batch:
            # The end of a text cuts a path that was right: its last nodes were not judged.
            if step.tree.tokens and step.row in self.lengths and step.row.finish_reason is None:
                self.memory.observe(self.lengths[step.row], step.tree, step.accepted)

    def forget(self, row: Row, reason: str) -> None:
        self.lengths.pop(row, None)


def _check_vocabulary(store: Store, name: str, target: Target) -> None:
    """Raise ConfigError if ids mean something else: by tokenizer, or else by size, which may be padded."""
    own, header = fingerprint(target.checkpoint.tokenizer), store.header
    if header.tokenizer and own:
        if header.tokenizer != own:
            raise ConfigError(
                f"the datastore {name!r} was made with another tokenizer than the target's: build it again "
                f"with the target."
            )
    elif header.vocabulary != target.vocabulary:
        raise ConfigError(
            f"the datastore {name!r} has a vocabulary of {header.vocabulary}, the target one of "
            f"{target.vocabulary}: build it again."
        )
