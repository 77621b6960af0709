"""Retrieval from a corpus (REST, He et al. 2023, arXiv 2311.08252): what followed the last tokens in a datastore.

`outrider datastore build` makes one.  The longest match counts; the most frequent continuations become a tree.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from outrider.core.row import Row
from outrider.core.step import Batch, Commit
from outrider.core.tree import EMPTY_TREE, Budget, Draft, DraftTree
from outrider.draft.datastore.corpus import build
from outrider.draft.datastore.store import SPAN, Store, fingerprint
from outrider.drafting.base import Drafter, Target
from outrider.drafting.lookup.matches import Belief, frequent
from outrider.errors import ConfigError

PLACES = 64  # of a match that are looked at, evenly spread; REST: 5000, but what is worth guessing (0.1) is in all but 0.1% of these


class Datastore(Drafter):
    depth = 10
    demo: ClassVar = {"REST": {"datastore": "builtin-datastore"}}

    @dataclass(frozen=True)
    class Options:
        """datastore: the file, or "builtin-datastore".  max_token_span, min_token_span: the longest and shortest match that is
        looked up.  num_draft: nodes of a tree at most (REST's names; None: its 64, but 8 on a CPU, where every node costs time).
        min_token_prob: paths less likely are not guessed.
        """

        datastore: str | None = None
        max_token_span: int = SPAN
        min_token_span: int = 2
        num_draft: int | None = None
        min_token_prob: float = 0.1

        def __post_init__(self) -> None:
            def need(name: str, kinds: type | tuple[type, ...], good: Any, what: str) -> None:
                value = getattr(self, name)
                if not isinstance(value, kinds) or isinstance(value, bool) or not good(value):
                    raise ConfigError(f"{name} must be {what}, got {value!r}.")

            need("datastore", (str, type(None)), lambda x: x != "", "a file")
            need("max_token_span", int, lambda x: 1 <= x <= SPAN, f"a whole number in 1 … {SPAN}")
            need(
                "min_token_span",
                int,
                lambda x: 1 <= x <= self.max_token_span,
                f"in 1 … max_token_span ({self.max_token_span})",
            )
            need(
                "num_draft",
                (int, type(None)),
                lambda x: x is None or 1 <= x <= 1024,
                "a whole number in 1 … 1024",
            )
            need("min_token_prob", (int, float), lambda x: 0 <= x <= 1, "a number in [0, 1]")

    def __init__(self, options: Options, target: Target) -> None:
        super().__init__(options, target)
        if options.datastore is None:
            raise ConfigError(
                "the method needs a 'datastore': `outrider datastore build` makes one; the built-in target has 'builtin-datastore'."
            )
        self.store = Store(options.datastore)
        _fits(self.store, options.datastore, target)
        self.nodes = options.num_draft or (8 if target.decoder.device.type == "cpu" else 64)
        self.memory = Belief(SPAN, learn=0.05)  # what the corpus is worth, whatever the request
        self.lengths: dict[Row, int] = {}  # of the match that the row's last guesses came from

    @classmethod
    def example(cls, target: Target) -> Drafter:
        """A small random corpus: nearly every pair of tokens is in it."""
        with tempfile.TemporaryDirectory() as folder:
            corpus, file = Path(folder) / "corpus.npy", str(Path(folder) / "store")
            np.save(corpus, np.random.default_rng(0).integers(0, target.vocabulary, 100_000))
            build([str(corpus)], file, target.checkpoint.tokenizer, target.vocabulary)
            return cls(
                cls.Options(datastore=file, min_token_span=1, min_token_prob=0.0, num_draft=12), target
            )

    def size(self, depth: int) -> int:
        return self.nodes if depth else 0

    def propose(self, batch: Batch) -> Draft:
        return Draft(
            [self.after(step.row, (), step.budget) if step.budget.nodes else EMPTY_TREE for step in batch]
        )

    def after(self, row: Row, said: Sequence[int], budget: Budget) -> DraftTree:
        least, shortest = self.options.min_token_prob, self.options.min_token_span
        belief: Belief = self.memory
        longest = self.options.max_token_span
        length, texts = self.store.find(
            [*row.tokens[-longest:], *said], shortest, longest, PLACES, budget.depth
        )
        if length and belief(length) < least:
            belief.passed(length, length)
            return EMPTY_TREE
        self.lengths[row] = length
        return frequent(texts, budget, belief, length, least, self.nodes)[0]

    def observe(self, commit: Commit) -> None:
        for step in commit.batch:
            if step.tree.tokens and step.row in self.lengths:
                self.memory.observe(self.lengths[step.row], step.tree, step.accepted)

    def forget(self, row: Row, reason: str) -> None:
        self.lengths.pop(row, None)


def _fits(store: Store, name: str, target: Target) -> None:
    """Refuses ids that mean something else.  Where both tokenizers are known they decide: vocabularies may be padded."""
    ours, header = fingerprint(target.checkpoint.tokenizer), store.header
    if header.tokenizer and ours and header.tokenizer != ours:
        raise ConfigError(
            f"the datastore {name!r} was made with another tokenizer than the target's: build it again with the target."
        )
    if not (header.tokenizer and ours) and header.vocabulary != target.vocabulary:
        raise ConfigError(
            f"the datastore {name!r} has a vocabulary of {header.vocabulary}, the target one of {target.vocabulary}: build it again."
        )
