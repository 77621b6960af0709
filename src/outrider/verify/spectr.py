"""K-SEQ selection of SpecTr (Sun et al. 2023, arXiv 2310.15141), for siblings drawn independently.

Of k independent samples of q, the first is accepted that passes with probability min(1, p(x) / (ρ q(x))).
With β = Σ min(q, p/ρ), any token is accepted with probability 1 - (1 - β)^k, and x with

    min(q(x), p(x)/ρ) (1 - (1 - β)^k) / β

which exceeds p(x) nowhere if (1 - (1 - β)^k) / β <= ρ.  The smallest such ρ in [1, k] accepts most, at least
1 - 1/e of what any rule can.  Without an accepted sample, the token comes from what is left of p.

Siblings with the accepted token continue together: the children of all of them are samples after one text.
Others than independent samples of one q are judged as by `rejection`, which a chain is, too.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from outrider.core.tree import ROOT, DraftTree
from outrider.sampling.random_streams import normal
from outrider.verify.base import RowPicker, Rule, children_of, q_of
from outrider.verify.rejection import among

HALVINGS = 30  # of the interval of ρ


class SpecTr(Rule):
    def walk(self, tree: DraftTree, target: RowPicker) -> tuple[list[int], list[int]]:
        children = children_of(tree)
        emitted: list[int] = []
        alike = [ROOT]  # nodes of one text, at the end of the accepted path
        while True:
            at, p = alike[0], target.p(alike[0], emitted)
            siblings = [child for node in alike for child in children.get(node, ())]
            q = _common(tree, siblings)
            if q is None:
                node, p = among(siblings, tree, p, target)
            else:
                node, p = _select(siblings, tree, p, q, target)
            if node is None:
                return _path(tree, at), [*emitted, target.draw(at, p)]
            token = tree.tokens[node]
            emitted.append(token)
            alike = [sibling for sibling in siblings if tree.tokens[sibling] == token]


def _common(tree: DraftTree, siblings: Sequence[int]) -> Tensor | None:
    """The distribution of which these are independent samples; None if they are anything else."""
    if len(siblings) < 2 or not tree.repeats or not tree.probs_of:
        return None
    first, compared = q_of(tree, siblings[0]), {tree.probs_of[siblings[0]]}
    for sibling in siblings[1:]:
        which = tree.probs_of[sibling]
        if which in compared:
            continue
        q = q_of(tree, sibling)  # after another node of the same text: it may be equal
        if first is None or q is None or not torch.equal(q, first):
            return None
        compared.add(which)
    return first


def _select(
    siblings: Sequence[int], tree: DraftTree, p: Tensor, q: Tensor, target: RowPicker
) -> tuple[int | None, Tensor]:
    """The accepted sample of q, or None and the distribution of the token to emit instead."""
    rho, beta = _division(p, q, len(siblings))
    for node in siblings:
        token = tree.tokens[node]
        if target.accept(node, float(p[token] / (rho * q[token]))):
            return node, p
    rest = (p - torch.minimum(q, p / rho) * _expected(beta, len(siblings))).clamp_min(0.0)
    return None, normal(rest) if rest.sum() > 0 else p


def _division(p: Tensor, q: Tensor, count: int) -> tuple[float, float]:
    """ρ for so many samples, from above, and its β."""
    low, high = 1.0, float(count)
    if (beta := _beta(p, q, low)) >= 1:
        return low, beta
    for _ in range(HALVINGS):
        rho = (low + high) / 2
        if _expected(_beta(p, q, rho), count) <= rho:
            high = rho
        else:
            low = rho
    return high, _beta(p, q, high)


def _beta(p: Tensor, q: Tensor, rho: float) -> float:
    """Probability that a sample passes."""
    return float(torch.minimum(q, p / rho).sum())


def _expected(beta: float, count: int) -> float:
    """Expected number of samples that are looked at: (1 - (1 - β)^k) / β."""
    return float(sum((1 - beta) ** i for i in range(count)))


def _path(tree: DraftTree, node: int) -> list[int]:
    """The nodes from the root to this one."""
    found: list[int] = []
    while node != ROOT:
        found.append(node)
        node = tree.parents[node]
    return found[::-1]
