"""Typical acceptance (Medusa: Cai et al. 2024, arXiv 2401.10774): NOT lossless, it changes what the target says.

A guess is accepted where p(x) > min(posterior_threshold, posterior_alpha · exp(-H(p))): likely enough for how sure the target is.
The longest path of such guesses wins, of equally long ones the likelier; then the target draws a token.  Greedy requests stay greedy.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor

from outrider.core.tree import ROOT, DraftTree
from outrider.errors import ConfigError
from outrider.verify.base import RowPicker, Rule, below


class Typical(Rule):
    lossless = False
    drawn = False

    @dataclass(frozen=True)
    class Options:
        """posterior_threshold, posterior_alpha: the epsilon and delta of the rule (Medusa's names and defaults)."""

        posterior_threshold: float = 0.09
        posterior_alpha: float = 0.3

        def __post_init__(self) -> None:
            for name in ("posterior_threshold", "posterior_alpha"):
                value = getattr(self, name)
                if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 < value <= 1:
                    raise ConfigError(f"{name} must be a number in (0, 1], got {value!r}.")

    def walk(self, tree: DraftTree, target: RowPicker) -> tuple[list[int], list[int]]:
        children = below(tree)
        best: tuple[int, float, list[int], list[int], Tensor] | None = None
        waiting: list[tuple[int, float, list[int], list[int]]] = [(ROOT, 0.0, [], [])]
        while waiting:
            node, score, path, said = waiting.pop()
            p = target.p(node, said)
            if best is None or (len(path), score) > best[:2]:
                best = len(path), score, path, said, p
            least = self._least(p)
            for child in children.get(node, ()):
                share = float(p[tree.tokens[child]])
                if share > least:
                    waiting.append(
                        (child, score + math.log(share), [*path, child], [*said, tree.tokens[child]])
                    )
        assert best is not None
        _, _, path, said, p = best
        return path, [*said, target.draw(path[-1] if path else ROOT, p)]

    def _least(self, p: Tensor) -> float:
        entropy = -float(p.xlogy(p).sum())
        return float(min(self.options.posterior_threshold, self.options.posterior_alpha * math.exp(-entropy)))
