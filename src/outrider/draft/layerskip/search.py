"""Finds the sublayers to skip while the model answers (SWIFT, arXiv 2410.06916): candidates are tried on what was just said."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from outrider.draft.layerskip.sets import Skip

KAPPA, NOISE = 2.5, 1e-2  # of the published Bayesian suggestions
OFFERED, REMEMBERED = 256, 512  # random sets that a suggestion is chosen from; trials that it looks at


@dataclass
class Search:
    """The best set so far and how it was found.  First and last layer are never skipped; every candidate skips `size` sublayers."""

    layers: int
    size: int
    best: Skip
    bayes_interval: int
    max_opt_iter: int
    max_tolerance_iter: int
    max_score: float
    score: float = -1.0
    idle: int = 0  # trials since the best one
    steps: int = 0  # of decoding, while it went on
    tried: list[Skip] = field(default_factory=list)
    scores: list[float] = field(default_factory=list)
    random_streams: random.Random = field(default_factory=lambda: random.Random(0))

    @property
    def done(self) -> bool:
        count = len(self.scores)
        return (
            self.score > self.max_score or self.idle >= self.max_tolerance_iter or count >= self.max_opt_iter
        )

    def suggest(self) -> Skip:
        """The set to begin with, then random ones, and now and then the one that past trials speak for most."""
        count = len(self.scores)
        if not count:
            return self.best
        return self._likely() if count % self.bayes_interval == 0 else self._random()

    def learn(self, skip: Skip, score: float) -> None:
        self.tried.append(skip)
        self.scores.append(score)
        self.idle += 1
        if score > self.score:
            self.best, self.score, self.idle = skip, score, 0

    def _random(self) -> Skip:
        chosen = self.random_streams.sample(
            [(kind, i) for kind in (0, 1) for i in range(1, self.layers - 1)], self.size
        )
        attention, mlp = (tuple(sorted(i for kind, i in chosen if kind == which)) for which in (0, 1))
        return Skip(attention, mlp)

    def _likely(self) -> Skip:
        """Of some random sets the one with the highest upper confidence bound under a Gaussian process over past trials."""
        offered = [self._random() for _ in range(OFFERED)]
        seen, new = (
            np.array([self._switches(skip) for skip in skips])
            for skips in (self.tried[-REMEMBERED:], offered)
        )
        scores = np.array(self.scores[-REMEMBERED:])
        scores = (scores - scores.mean()) / (scores.std() or 1.0)
        cross = _alike(seen, new)
        solved = np.linalg.solve(
            _alike(seen, seen) + NOISE * np.eye(len(seen)), np.column_stack([scores, cross])
        )
        spread = np.sqrt(np.maximum(1 - (cross * solved[:, 1:]).sum(0), 0))
        return offered[int(np.argmax(cross.T @ solved[:, 0] + KAPPA * spread))]

    def _switches(self, skip: Skip) -> list[float]:
        return [float(i in part) for part in (skip.attention, skip.mlp) for i in range(self.layers)]


def _alike(a: NDArray[np.float64], b: NDArray[np.float64]) -> NDArray[np.float64]:
    """exp(-4 · share of the switches that differ) of every pair: [len(a), len(b)]."""
    different = a.sum(1)[:, None] + b.sum(1)[None] - 2 * a @ b.T
    return np.asarray(np.exp(-4 * different / a.shape[1]))
