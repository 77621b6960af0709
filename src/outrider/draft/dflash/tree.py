"""From the logits of a block to guesses.

A block has one row of logits for each level, whatever stands before it, so that nodes of a level differ by rank alone, and a tree is
a set of ranks.  A chain is the first rank of every level.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from torch import Tensor

from outrider.draft.draft_model.tree import DRAWN
from outrider.heads.choose import Chooser
from outrider.heads.templates import Path
from outrider.sampling import dice
from outrider.types import ROOT, Guesses, Row


def chain(levels: int) -> list[Path]:
    return [(0,) * level for level in range(1, levels + 1)]


def ranks(tree: Guesses) -> list[int]:
    """Of every node among its siblings."""
    before = Counter[int]()
    found = []
    for parent in tree.parents:
        found.append(before[parent])
        before[parent] += 1
    return found


class Grower:
    """logits float32 [levels, Vd]: row i is for position len(row.tokens) + i."""

    def __init__(self, row: Row, logits: Tensor, choose: Chooser) -> None:
        self.row, self.logits, self.choose = row, logits, choose
        self.laws: list[Tensor] = []
        self.law_at: dict[Path, int] = {}  # where the law behind a node stands, or without processors that of its level
        self.ranked: tuple[list[list[int]], list[list[float]]] | None = None

    def grow(self, paths: Sequence[Path], lot: int | None) -> Guesses:
        """The nodes of these paths of ranks; the parents of all are among them, and the ranks of siblings are 0, 1, …

        lot: tokens are drawn, with dice from this number on.  How many children a node has depends on its place alone, never on what was
        drawn, so they are draws of its law.
        """
        tree, law_of, children = Guesses([], [], []), list[int](), Counter(path[:-1] for path in paths)
        nodes: dict[Path, int] = {(): ROOT}
        said: dict[Path, list[int]] = {(): []}
        if lot is None and not self.row.processors and paths:
            self.ranked = self._best([range(level) for level in range(len(self.logits))], self.logits, max(children.values()))
        for parent in sorted(children, key=lambda path: (len(path), path)):
            if parent not in nodes:
                continue  # there were fewer tokens than ranks
            if lot is None:
                law, found = -1, self._chosen(said[parent], children[parent])
            else:
                law, found = self._drawn(parent, said[parent], range(lot + len(law_of), lot + len(law_of) + children[parent]))
            for rank, (token, confidence) in enumerate(found):
                child = (*parent, rank)
                said[child], nodes[child] = [*said[parent], token], len(law_of)
                tree.tokens.append(token)
                tree.parents.append(nodes[parent])
                tree.confidence.append(confidence)
                law_of.append(law)
        return tree if lot is None else tree._replace(laws=self.laws, law_of=law_of)

    def _chosen(self, path: list[int], count: int) -> list[tuple[int, float]]:
        """The best tokens behind a path, and how likely each is."""
        tokens, shares = self.ranked or self._best([path], self.logits[len(path)][None], count)
        at = len(path) if self.ranked else 0
        return [(token, share) for token, share in zip(tokens[at][:count], shares[at]) if token >= 0]

    def _best(self, paths: Sequence[Sequence[int]], logits: Tensor, count: int) -> tuple[list[list[int]], list[list[float]]]:
        tokens, shares = self.choose.best(self.row, paths, logits, count)
        return tokens.tolist(), shares.tolist()

    def _drawn(self, parent: Path, path: list[int], dies: range) -> tuple[int, list[tuple[int, float]]]:
        """Draws from the law behind a path; where it stands among the laws."""
        key = parent if self.row.processors else (0,) * len(parent)
        if key not in self.law_at:
            law = self.choose.law(self.row, path, self.logits[len(path)])
            if law is None:
                return -1, []
            self.law_at[key] = len(self.laws)
            self.laws.append(law)
        at = self.law_at[key]
        return at, list(zip(dice.children(self.row, self.laws[at], dies), DRAWN))
