"""From the logits of a block to guesses.

A block has one row of logits for each level, whatever stands before it (unless the head adds what the token before says), so that nodes of
a level differ by rank alone, and a tree is a set of ranks.  A chain is the first rank of every level.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Generator, Sequence

from torch import Tensor

from outrider.core.row import Row
from outrider.core.tree import ROOT, DraftTree
from outrider.drafting.trees.sampled import DRAWN
from outrider.heads.choose import Chooser
from outrider.heads.templates import Path
from outrider.sampling import random_streams

Ranked = list[tuple[int, float]]  # tokens, best first, and how likely each is


def chain(levels: int) -> list[Path]:
    return [(0,) * level for level in range(1, levels + 1)]


class Grower:
    """logits float32 [levels, Vd]: row i is for position len(row.tokens) + i."""

    def __init__(self, row: Row, logits: Tensor, choose: Chooser) -> None:
        self.row, self.logits, self.choose = row, logits, choose
        self.distributions: list[Tensor] = []
        self.law_at: dict[Path, int] = {}  # where the law behind a node stands, or that of its level
        self.ranked: list[Ranked] = []  # of each level, where they are the same behind all of its nodes

    def grow(
        self, paths: Sequence[Path], stream_id: int | None
    ) -> Generator[list[int], Tensor | None, DraftTree]:
        """The nodes of these paths of ranks; the parents of all are among them, and the ranks of siblings are 0, 1, …

        Yields, level by level, the tokens behind which it guesses, and wants what each adds to the level's logits, [n, Vd], or None.
        lot: tokens are drawn, with dice from this number on.  How many children a node has depends on its place alone, never on what was
        drawn, so they are draws of its law.
        """
        tree, probs_of, children = DraftTree([], [], []), list[int](), Counter(path[:-1] for path in paths)
        nodes: dict[Path, int] = {(): ROOT}
        said: dict[Path, list[int]] = {(): []}
        for level in range(len(self.logits)):
            parents = [path for path in sorted(children) if len(path) == level and path in nodes]
            if not parents:
                break
            added = yield [said[path][-1] if path else self.row.tokens[-1] for path in parents]
            chosen = (
                self._chosen(level, [said[path] for path in parents], max(children.values()), added)
                if stream_id is None
                else []
            )
            for i, parent in enumerate(parents):
                distribution, found = -1, chosen[i][: children[parent]] if stream_id is None else []
                if stream_id is not None:
                    dies = range(stream_id + len(probs_of), stream_id + len(probs_of) + children[parent])
                    distribution, found = self._drawn(
                        parent, said[parent], None if added is None else added[i], dies
                    )
                for rank, (token, confidence) in enumerate(found):
                    child = (*parent, rank)
                    said[child], nodes[child] = [*said[parent], token], len(probs_of)
                    tree.tokens.append(token)
                    tree.parents.append(nodes[parent])
                    tree.confidence.append(confidence)
                    probs_of.append(distribution)
        return (
            tree if stream_id is None else tree._replace(distributions=self.distributions, probs_of=probs_of)
        )

    def _chosen(self, level: int, paths: list[list[int]], count: int, added: Tensor | None) -> list[Ranked]:
        """The best tokens behind each path of a level."""
        if added is None and not self.row.processors:
            self.ranked = self.ranked or self._best(
                [range(level) for level in range(len(self.logits))], self.logits, count
            )
            return [self.ranked[level]] * len(paths)
        logits = (
            self.logits[level] + added if added is not None else self.logits[level].expand(len(paths), -1)
        )
        return self._best(paths, logits, count)

    def _best(self, paths: Sequence[Sequence[int]], logits: Tensor, count: int) -> list[Ranked]:
        tokens, shares = self.choose.best(self.row, paths, logits, count)
        return [
            [(token, share) for token, share in zip(*one) if token >= 0]
            for one in zip(tokens.tolist(), shares.tolist())
        ]

    def _drawn(self, parent: Path, path: list[int], added: Tensor | None, dies: range) -> tuple[int, Ranked]:
        """Draws from the law behind a path; where it stands among the laws."""
        key = (0,) * len(parent) if added is None and not self.row.processors else parent
        if key not in self.law_at:
            logits = self.logits[len(path)]
            distribution = self.choose.distribution(
                self.row, path, logits if added is None else logits + added
            )
            if distribution is None:
                return -1, []
            self.law_at[key] = len(self.distributions)
            self.distributions.append(distribution)
        at = self.law_at[key]
        return at, list(zip(random_streams.children(self.row, self.distributions[at], dies), DRAWN))
