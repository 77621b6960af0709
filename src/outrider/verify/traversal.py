"""Traversal verification (Weng et al. 2025, arXiv 2505.12398).

Verifies a tree from its leaves to the root, which accepts more than the reverse.  On a chain it is block
verification.

- r(root) = 1, r(v) = min(1, r(parent) p(v)/q(v)).
- The first leaf v, depth first, is accepted with all its ancestors with probability r(v).
- Otherwise v is removed, and its parent w gets its residual: S = Σ [r(w) p - q]₊, p = [r(w) p - q]₊ / S,
  r(w) = S / (S + 1 - r(w)), q without v.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor

from outrider.core.tree import ROOT, DraftTree
from outrider.sampling.random_streams import without
from outrider.verify.base import RowPicker, Rule, children_of, point_mass, q_of, residual


@dataclass
class _OpenNode:
    """A node while its children are verified.

    q: what it was sampled from.  r: its acceptance.  p: the target's distribution after it, or what its
    rejected children leave of it.  children: those left, each with what it was sampled from.
    """

    node: int
    token: int
    q: Tensor
    r: float
    p: Tensor
    children: Iterator[tuple[int, Tensor]]

    def reject(self, q: Tensor) -> None:
        """Take the residual of p after a rejected child that was sampled from q."""
        self.p, mass = residual(self.p, q, self.r)
        self.r = mass / (mass + 1 - self.r) if self.r < 1 else 1.0


class Traversal(Rule):
    kernel = "traversal"

    def walk(self, tree: DraftTree, target: RowPicker) -> tuple[list[int], list[int]]:
        children = children_of(tree)
        p = target.p(ROOT, [])
        path = [_OpenNode(ROOT, ROOT, p, 1.0, p, _with_q(tree, children[ROOT], p))]
        while True:
            tip = path[-1]
            tokens = [above.token for above in path[1:]]
            child, q = next(tip.children, (None, tip.p))
            if child is None:  # a leaf, or all its children are rejected
                if tip.node == ROOT or target.accept(tip.node, tip.r):
                    return [above.node for above in path[1:]], [*tokens, target.draw(tip.node, tip.p)]
                path.pop()
                path[-1].reject(tip.q)
                continue
            token = tree.tokens[child]
            ratio = min(1.0, tip.r * float(tip.p[token] / q[token]))
            if not ratio > 0:
                tip.reject(q)
                continue
            p = target.p(child, [*tokens, token])
            path.append(_OpenNode(child, token, q, ratio, p, _with_q(tree, children.get(child, ()), p)))


def _with_q(tree: DraftTree, children: Sequence[int], p: Tensor) -> Iterator[tuple[int, Tensor]]:
    """The children in order, each with the distribution that it was sampled from, given those before it."""
    left: dict[int, Tensor] = {}
    for child in children:
        token, distribution = tree.tokens[child], q_of(tree, child)
        if distribution is None:
            yield child, point_mass(token, p)
            continue
        q = left.get(tree.probs_of[child], distribution)
        left[tree.probs_of[child]] = q if tree.repeats else without(q, token)
        yield child, q
