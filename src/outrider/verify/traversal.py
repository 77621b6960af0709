"""Traversal verification (Weng et al. 2025, arXiv 2505.12398): a tree is judged from its leaves up, which accepts more than from
the root down; on a chain it is block verification.

r(root) = 1, r(v) = min(1, r(parent) p(v)/q(v)).  The first leaf v, depth first, is accepted with all its ancestors with probability
r(v).  Otherwise it is taken away, and its parent w becomes what is left of it: S = Σ [r(w) p - q]₊, p = [r(w) p - q]₊ / S,
r(w) = S / (S + 1 - r(w)), q without v.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from outrider.sampling.dice import without
from outrider.types import ROOT, Guesses
from outrider.verify.base import Answers, Rule, below, surplus


class Traversal(Rule):
    def walk(self, tree: Guesses, target: Answers) -> tuple[list[int], list[int]]:
        found = _Walk(tree, target).accepted(ROOT, 1.0, [], [])
        assert found is not None, "the root is always accepted"
        return found


class _Walk:
    def __init__(self, tree: Guesses, target: Answers) -> None:
        self.tree, self.target, self.children = tree, target, below(tree)

    def accepted(self, node: int, r: float, path: list[int], said: list[int]) -> tuple[list[int], list[int]] | None:
        """Judges the subtree of `node`, whose path and tokens include its own: what is accepted and emitted, None if nothing is."""
        p = self.target.p(node, said)
        for child, q in self._drawn(node, p):
            token = self.tree.tokens[child]
            ratio = min(1.0, r * float(p[token] / q[token]))
            found = self.accepted(child, ratio, [*path, child], [*said, token])
            if found is not None:
                return found
            p, mass = surplus(p, q, r)
            r = mass / (mass + 1 - r) if r < 1 else 1.0
        if node == ROOT or self.target.accept(node, r):
            return path, [*said, self.target.draw(node, p)]
        return None

    def _drawn(self, node: int, p: Tensor) -> Iterator[tuple[int, Tensor]]:
        """The children in order, each with the law that it was drawn from, given those before it."""
        left: dict[int, Tensor] = {}
        for child in self.children.get(node, ()):
            token, law = self.tree.tokens[child], self.tree.law(child)
            if law is None:
                point = torch.zeros_like(p)
                point[token] = 1.0
                yield child, point
                continue
            q = left.get(self.tree.law_of[child], law)
            left[self.tree.law_of[child]] = q if self.tree.repeats else without(q, token)
            yield child, q
