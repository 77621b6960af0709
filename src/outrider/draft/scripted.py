"""A drafter that runs a script: for tests of the engine, and for examining single trees."""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated

from outrider.core.row import Row
from outrider.core.step import Batch
from outrider.core.tree import EMPTY_TREE, ROOT, Budget, Draft, DraftTree
from outrider.core.validate import Checked, Count, Kind
from outrider.drafting.base import Drafter, Target
from outrider.drafting.trees.builder import TreeBuilder
from outrider.errors import ConfigError

Script = Callable[[Row, Budget], DraftTree]


def silent(row: Row, budget: Budget) -> DraftTree:
    return EMPTY_TREE


def tree(row: Row, budget: Budget) -> DraftTree:
    """A binary tree in breadth-first order, of tokens from the row: mostly wrong."""
    tokens = [row.tokens[(7 * i) % len(row.tokens)] ^ (i & 1) for i in range(budget.nodes)]
    parents = [(i - 2) // 2 if i >= 2 else ROOT for i in range(budget.nodes)]
    return DraftTree(tokens, parents, [0.5] * len(tokens))


class Scripted(Drafter):
    @dataclass(frozen=True)
    class Options(Checked):
        """script: (row, budget) -> DraftTree.  nodes: maximum size of a tree of any depth."""

        script: Annotated[Script, Kind("a function (row, budget) -> DraftTree", callable)] = silent
        nodes: Count = 64

    @classmethod
    def example(cls, target: Target) -> Drafter:
        return cls(cls.Options(tree, 14), target)

    def size(self, depth: int) -> int:
        return self.options.nodes if depth else 0

    def propose(self, batch: Batch) -> Draft:
        return Draft([self._tree(step.row, step.budget) for step in batch])

    def _tree(self, row: Row, budget: Budget) -> DraftTree:
        """Run the script.  An error in it ends the row."""
        if not budget.nodes:
            return EMPTY_TREE
        try:
            return self._clean(_plain(self.options.script(row, budget)))
        except Exception as error:  # user code can raise anything
            row.error = ConfigError(f"script of the scripted drafter: {type(error).__name__}: {error}")
            row.error.__cause__ = error
            return EMPTY_TREE

    def _clean(self, draft_tree: DraftTree) -> DraftTree:
        """Drop tokens outside the vocabulary and repeated siblings, with their descendants."""
        size = len(draft_tree.tokens)
        cleaned, node_of, children = TreeBuilder(Budget(size, size)), {ROOT: ROOT}, set()
        for i, (token, parent) in enumerate(zip(draft_tree.tokens, draft_tree.parents)):
            at = node_of.get(parent)
            if at is None or (at, token) in children or not 0 <= token < self.target.vocabulary:
                continue
            children.add((at, token))
            node_of[i] = cleaned.add(at, token, draft_tree.confidence[i])
        return cleaned.draft_tree


def _plain(result: DraftTree) -> DraftTree:
    """The result of a script as Python numbers.  Raises TypeError or ValueError if it is no tree."""
    if not isinstance(result, DraftTree):
        raise TypeError(f"it must return a DraftTree, got {type(result).__name__}.")
    tokens, parents = ([operator.index(x) for x in numbers] for numbers in (result.tokens, result.parents))
    confidence = [max(0.0, float(x)) for x in result.confidence]
    sizes = len(tokens), len(parents), len(confidence)
    if len({*sizes}) > 1:
        raise ValueError(f"tokens, parents and confidence must be equally long, got {sizes}.")
    return DraftTree(tokens, parents, confidence)
