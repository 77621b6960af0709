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
from outrider.verify.base import RowPicker, Rule, below, point_mass, surplus


@dataclass
class _Open:
    """A node while its children are verified.  p, r: residual, acceptance.  q: what it was sampled from."""

    node: int
    token: int
    q: Tensor | None
    r: float
    p: Tensor
    children: Iterator[tuple[int, Tensor]]


class Traversal(Rule):
    kernel = "traversal"

    def walk(self, tree: DraftTree, target: RowPicker) -> tuple[list[int], list[int]]:
        children = below(tree)

        def opened(node: int, token: int, q: Tensor | None, r: float) -> _Open:
            p = target.p(node, [*(at.token for at in path[1:]), token] if path else [])
            return _Open(node, token, q, r, p, _drawn(tree, children.get(node, ()), p))

        path: list[_Open] = []
        path.append(opened(ROOT, ROOT, None, 1.0))
        while True:
            tip = path[-1]
            child, q = next(tip.children, (None, tip.p))
            if child is not None:
                token = tree.tokens[child]
                ratio = min(1.0, tip.r * float(tip.p[token] / q[token]))
                if ratio > 0:
                    path.append(opened(child, token, q, ratio))
                    continue
            elif tip.node == ROOT or target.accept(tip.node, tip.r):
                emitted = [at.token for at in path[1:]]
                return [at.node for at in path[1:]], [*emitted, target.draw(tip.node, tip.p)]
            else:
                assert tip.q is not None
                q, tip = tip.q, path[-2]
                path.pop()
            tip.p, mass = surplus(tip.p, q, tip.r)  # the child is taken away
            tip.r = mass / (mass + 1 - tip.r) if tip.r < 1 else 1.0


def _drawn(tree: DraftTree, children: Sequence[int], p: Tensor) -> Iterator[tuple[int, Tensor]]:
    """The children in order, each with the distribution that it was drawn from, given those before it."""
    left: dict[int, Tensor] = {}
    for child in children:
        token, distribution = tree.tokens[child], tree.distribution(child)
        if distribution is None:
            yield child, point_mass(token, p)
            continue
        q = left.get(tree.probs_of[child], distribution)
        left[tree.probs_of[child]] = q if tree.repeats else without(q, token)
        yield child, q
