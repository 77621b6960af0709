"""Block verification (Sun et al. 2024, arXiv 2403.10444).

Judges a chain as a whole, which accepts more than token by token.

With p_0 = 1 and p_i = min(1, p_{i-1} p(x_i)/q(x_i)), the first i tokens are accepted with probability
h_i = S_i / (S_i + 1 - p_i), S_i = Σ [p_i p(·|x_1…x_i) - q(·|x_1…x_i)]₊.
Longer prefixes are tried first; h of the whole chain is p_γ.
"""

from __future__ import annotations

from torch import Tensor

from outrider.core.tree import ROOT, DraftTree
from outrider.verify.base import RowPicker, Rule, point_mass, q_of, residual


class Block(Rule):
    branches = False
    kernel = "block"

    def walk(self, tree: DraftTree, target: RowPicker) -> tuple[list[int], list[int]]:
        # the chain from the root; other branches are not judged
        length = next((i for i in range(tree.size) if tree.parents[i] != i - 1), tree.size)
        distributions, p_of = [target.p(ROOT, [])], [1.0]  # p_of[i]: the paper's p_i
        for i, token in enumerate(tree.tokens[:length]):
            p = distributions[i]
            p_of.append(min(1.0, p_of[i] * float(p[token] / _q(tree, i, p)[token])))
            if not p_of[-1]:
                break  # rejected for certain: deeper nodes are not evaluated
            distributions.append(target.p(i, tree.tokens[: i + 1]))
        for count in range(len(distributions) - 1, 0, -1):  # whether so many tokens are accepted
            p, h = distributions[count], p_of[count]
            if count < length:
                p, mass = residual(p, _q(tree, count, p), h)
                h = mass / (mass + 1 - h) if h < 1 else 1.0
            if target.accept(count - 1, h):
                return list(range(count)), [*tree.tokens[:count], target.draw(count - 1, p)]
        p = distributions[0]
        if length:
            p, _ = residual(p, _q(tree, 0, p))
        return [], [target.draw(ROOT, p)]


def _q(tree: DraftTree, node: int, like: Tensor) -> Tensor:
    q = q_of(tree, node)
    return point_mass(tree.tokens[node], like) if q is None else q
