"""Typical acceptance (Medusa: Cai et al. 2024, arXiv 2401.10774): NOT lossless.

A draft token is accepted if p(x) > min(posterior_threshold, posterior_alpha · exp(-H(p))).  The longest path
of such tokens is emitted; ties go to the likelier path.  Then a token is sampled from the target's
distribution.  Greedy requests stay greedy.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, NamedTuple

from torch import Tensor

from outrider.core.tree import ROOT, DraftTree
from outrider.core.validate import Checked, real
from outrider.verify.base import RowPicker, Rule, children_of

Part = Annotated[float, real("a number in (0, 1]", lambda value: 0 < value <= 1)]


class _Path(NamedTuple):
    """Nodes from the root on, the tokens of all but the root, and the log of their joint probability."""

    nodes: list[int]
    tokens: list[int]
    score: float


class Typical(Rule):
    lossless = False
    needs_probs = False

    @dataclass(frozen=True)
    class Options(Checked):
        """Epsilon (posterior_threshold) and delta (posterior_alpha), with Medusa's names and defaults."""

        posterior_threshold: Part = 0.09
        posterior_alpha: Part = 0.3

    def walk(self, tree: DraftTree, target: RowPicker) -> tuple[list[int], list[int]]:
        children = children_of(tree)
        best = root = _Path([ROOT], [], 0.0)
        best_p = target.p(ROOT, [])
        stack = [root]
        while stack:
            path = stack.pop()
            p = best_p if path is root else target.p(path.nodes[-1], path.tokens)
            if (len(path.nodes), path.score) > (len(best.nodes), best.score):
                best, best_p = path, p
            threshold = self._threshold(p)
            for child in children.get(path.nodes[-1], ()):
                token = tree.tokens[child]
                probability = float(p[token])
                if probability > threshold:
                    score = path.score + math.log(probability)
                    stack.append(_Path([*path.nodes, child], [*path.tokens, token], score))
        return best.nodes[1:], [*best.tokens, target.draw(best.nodes[-1], best_p)]

    def _threshold(self, p: Tensor) -> float:
        entropy = -float(p.xlogy(p).sum())
        return float(min(self.options.posterior_threshold, self.options.posterior_alpha * math.exp(-entropy)))
