"""A drafter that says what it is told: for tests of the engine, and for looking at one tree under a microscope."""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass

from outrider.core.row import Row
from outrider.core.step import Batch
from outrider.core.tree import EMPTY_TREE, Budget, Draft, DraftTree
from outrider.drafting.base import Drafter, Target
from outrider.errors import ConfigError

Script = Callable[[Row, Budget], DraftTree]


def silent(row: Row, budget: Budget) -> DraftTree:
    return EMPTY_TREE


def tree(row: Row, budget: Budget) -> DraftTree:
    """Two children a node, breadth first, of tokens that happened to be in the row: a tree that is mostly wrong."""
    tokens, parents = [], []
    for i in range(budget.nodes):
        parent = (i - 2) // 2 if i >= 2 else -1
        tokens.append(row.tokens[(7 * i) % len(row.tokens)] ^ (i & 1))
        parents.append(parent)
    return DraftTree(tokens, parents, [0.5] * len(tokens))


class Scripted(Drafter):
    @dataclass(frozen=True)
    class Options:
        """script: (row, budget) -> Guesses.  nodes: how many a tree may have, whatever its depth."""

        script: Script = silent
        nodes: int = 64

        def __post_init__(self) -> None:
            if not callable(self.script):
                raise ConfigError(f"script must be a function (row, budget) -> Guesses, got {self.script!r}.")
            if not isinstance(self.nodes, int) or self.nodes < 1:
                raise ConfigError(f"nodes must be a whole number of at least 1, got {self.nodes!r}.")

    @classmethod
    def example(cls, target: Target) -> Drafter:
        return cls(cls.Options(tree, 14), target)

    def size(self, depth: int) -> int:
        return self.options.nodes if depth else 0

    def propose(self, batch: Batch) -> Draft:
        return Draft([self._tree(step.row, step.budget) for step in batch])

    def _tree(self, row: Row, budget: Budget) -> DraftTree:
        """The script's tree.  A script that fails ends its row."""
        if not budget.nodes:
            return EMPTY_TREE
        try:
            return self._clean(_read(self.options.script(row, budget)))
        except Exception as error:  # a script is a program: it can raise anything
            row.error = ConfigError(f"script of the scripted drafter: {type(error).__name__}: {error}")
            row.error.__cause__ = error
            return EMPTY_TREE

    def _clean(self, said: DraftTree) -> DraftTree:
        """The tree without tokens that do not exist and without repeated siblings (and what hangs from these)."""
        place, children = {-1: -1}, set()
        tokens: list[int] = []
        parents: list[int] = []
        confidence: list[float] = []
        for i, (token, parent) in enumerate(zip(said.tokens, said.parents)):
            at = place.get(parent)
            if at is None or (at, token) in children or not 0 <= token < self.target.vocabulary:
                continue
            children.add((at, token))
            place[i] = len(tokens)
            tokens.append(token)
            parents.append(at)
            confidence.append(said.confidence[i])
        return DraftTree(tokens, parents, confidence)


def _read(said: DraftTree) -> DraftTree:
    """What a script returned, in plain numbers.  Raises TypeError or ValueError where it is no tree."""
    if not isinstance(said, DraftTree):
        raise TypeError(f"it must return Guesses, got {type(said).__name__}.")
    tokens, parents = ([operator.index(x) for x in numbers] for numbers in (said.tokens, said.parents))
    confidence = [float(x) for x in said.confidence]
    sizes = len(tokens), len(parents), len(confidence)
    if len({*sizes}) > 1:
        raise ValueError(f"tokens, parents and confidence must be equally long, got {sizes}.")
    return DraftTree(tokens, parents, confidence)
