"""Typical acceptance (Medusa: Cai et al. 2024, arXiv 2401.10774): NOT lossless.

A draft token is accepted if p(x) > min(posterior_threshold, posterior_alpha · exp(-H(p))).  The longest path
of such tokens is emitted; ties go to the likelier path.  Then a token is sampled from the target's
distribution.  Greedy requests stay greedy.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated

from torch import Tensor

from outrider.core.tree import ROOT, DraftTree
from outrider.core.validate import Checked, real
from outrider.verify.base import RowPicker, Rule, below

Part = Annotated[float, real("a number in (0, 1]", lambda value: 0 < value <= 1)]


class Typical(Rule):
    lossless = False
    drawn = False

    @dataclass(frozen=True)
    class Options(Checked):
        """Epsilon (posterior_threshold) and delta (posterior_alpha), with Medusa's names and defaults."""

        posterior_threshold: Part = 0.09
        posterior_alpha: Part = 0.3

    def walk(self, tree: DraftTree, target: RowPicker) -> tuple[list[int], list[int]]:
        children = below(tree)
        best: tuple[int, float, list[int], list[int], Tensor] | None = None
        stack: list[tuple[int, float, list[int], list[int]]] = [(ROOT, 0.0, [], [])]
        while stack:
            node, score, accepted, emitted = stack.pop()
            p = target.p(node, emitted)
            if best is None or (len(accepted), score) > best[:2]:
                best = len(accepted), score, accepted, emitted, p
            threshold = self._threshold(p)
            for child in children.get(node, ()):
                token = tree.tokens[child]
                share = float(p[token])
                if share > threshold:
                    stack.append((child, score + math.log(share), [*accepted, child], [*emitted, token]))
        assert best is not None
        _, _, accepted, emitted, p = best
        return accepted, [*emitted, target.draw(accepted[-1] if accepted else ROOT, p)]

    def _threshold(self, p: Tensor) -> float:
        entropy = -float(p.xlogy(p).sum())
        return float(min(self.options.posterior_threshold, self.options.posterior_alpha * math.exp(-entropy)))
