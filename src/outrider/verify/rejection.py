"""Rejection sampling: a guess is accepted with probability min(1, p/q), and what follows a rejection has the law [p - q]₊.

Chains: Leviathan et al. 2023 (arXiv 2211.17192), Chen et al. 2023 (2302.01318).  Siblings are judged in the order in which they
were drawn, each against what is left of p after the ones before it: independent draws as in SpecInfer (2305.09781), draws
without replacement as in EAGLE (2401.15077) and Sequoia (2402.12374), chosen ones as draws from a point mass.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

from outrider.core.tree import ROOT, DraftTree
from outrider.sampling.random_streams import without
from outrider.verify.base import RowPicker, Rule, below, surplus


class Rejection(Rule):
    def walk(self, tree: DraftTree, target: RowPicker) -> tuple[list[int], list[int]]:
        children = below(tree)
        path: list[int] = []
        said: list[int] = []
        node: int | None = ROOT
        while node is not None:
            at, p = node, target.p(node, said)
            node, p = self._among(children.get(at, ()), tree, p, target)
            if node is None:
                said.append(target.draw(at, p))
            else:
                path.append(node)
                said.append(tree.tokens[node])
        return path, said

    def _among(
        self, siblings: Iterable[int], tree: DraftTree, p: Tensor, target: RowPicker
    ) -> tuple[int | None, Tensor]:
        """The sibling that is accepted, or None and the law of the token that is emitted instead."""
        left: dict[int, Tensor] = {}  # law -> what it is without the siblings that were drawn from it
        for node in siblings:
            token, distribution = tree.tokens[node], tree.distribution(node)
            if distribution is None:
                if target.accept(node, float(p[token])):
                    return node, p
                p = without(p, token)
                continue
            q = left.get(tree.probs_of[node], distribution)
            if target.accept(node, float(p[token] / q[token])):
                return node, p
            p, _ = surplus(p, q)
            left[tree.probs_of[node]] = q if tree.repeats else without(q, token)
        return None, p
