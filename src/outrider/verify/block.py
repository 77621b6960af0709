"""Block verification (Sun et al. 2024, arXiv 2403.10444).

Judges a chain as a whole, which accepts more than token by token.

With p_0 = 1 and p_i = min(1, p_{i-1} p(x_i)/q(x_i)), the first i tokens are accepted with probability
h_i = S_i / (S_i + 1 - p_i), S_i = Σ [p_i p(·|x_1…x_i) - q(·|x_1…x_i)]₊.
Longer prefixes are tried first; h of the whole chain is p_γ.
"""

from __future__ import annotations

from torch import Tensor

from outrider.core.tree import ROOT, DraftTree
from outrider.verify.base import RowPicker, Rule, point_mass, surplus


class Block(Rule):
    branches = False
    kernel = "block"

    def walk(self, tree: DraftTree, target: RowPicker) -> tuple[list[int], list[int]]:
        # the chain from the root; other branches are not judged
        length = next((i for i in range(tree.size) if tree.parents[i] != i - 1), tree.size)
        distributions, so_far = [target.p(ROOT, [])], [1.0]
        for i, token in enumerate(tree.tokens[:length]):
            p = distributions[i]
            so_far.append(min(1.0, so_far[i] * float(p[token] / _q(tree, i, p)[token])))
            if not so_far[-1]:
                break  # rejected for certain: deeper nodes are not evaluated
            distributions.append(target.p(i, tree.tokens[: i + 1]))
        for end in reversed(range(len(distributions) - 1)):  # whether `end + 1` tokens are accepted
            rest, share = distributions[end + 1], so_far[end + 1]
            if end + 1 < length:
                rest, mass = surplus(rest, _q(tree, end + 1, rest), share)
                share = mass / (mass + 1 - share) if share < 1 else 1.0
            if target.accept(end, share):
                return list(range(end + 1)), [*tree.tokens[: end + 1], target.draw(end, rest)]
        rest = surplus(distributions[0], _q(tree, 0, distributions[0]))[0] if length else distributions[0]
        return [], [target.draw(ROOT, rest)]


def _q(tree: DraftTree, node: int, like: Tensor) -> Tensor:
    q = tree.distribution(node)
    return point_mass(tree.tokens[node], like) if q is None else q
