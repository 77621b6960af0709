"""Rejection sampling: accept a draft token with probability min(1, p/q), else sample from [p - q]₊.

Chains: Leviathan et al. 2023 (arXiv 2211.17192), Chen et al. 2023 (2302.01318).
Trees: siblings are verified in sampling order, each against the residual p of those before it.

- independent draws: SpecInfer (2305.09781)
- draws without replacement: EAGLE (2401.15077) and Sequoia (2402.12374)
- chosen siblings: draws from a point mass
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

from outrider.core.tree import ROOT, DraftTree
from outrider.sampling.random_streams import without
from outrider.verify.base import RowPicker, Rule, children_of, q_of, residual


class Rejection(Rule):
    kernel = "rejection"

    def walk(self, tree: DraftTree, target: RowPicker) -> tuple[list[int], list[int]]:
        children = children_of(tree)
        accepted: list[int] = []
        emitted: list[int] = []
        node: int | None = ROOT
        while node is not None:
            at, p = node, target.p(node, emitted)
            node, p = among(children.get(at, ()), tree, p, target)
            if node is None:
                emitted.append(target.draw(at, p))
            else:
                accepted.append(node)
                emitted.append(tree.tokens[node])
        return accepted, emitted


def among(
    siblings: Iterable[int], tree: DraftTree, p: Tensor, target: RowPicker
) -> tuple[int | None, Tensor]:
    """The accepted sibling, or None and the distribution of the token to emit instead."""
    left: dict[int, Tensor] = {}  # index of q -> q without the siblings drawn from it
    for node in siblings:
        token, distribution = tree.tokens[node], q_of(tree, node)
        if distribution is None:
            if target.accept(node, float(p[token])):
                return node, p
            p = without(p, token)
            continue
        q = left.get(tree.probs_of[node], distribution)
        if target.accept(node, float(p[token] / q[token])):
            return node, p
        p, _ = residual(p, q)
        left[tree.probs_of[node]] = q if tree.repeats else without(q, token)
    return None, p
