"""Search for the sublayers to skip while serving (SWIFT, arXiv 2410.06916): candidates are scored on recent
output.

The Gaussian process is written out here.  All candidates skip the same number of sublayers, a constraint that
optuna's samplers cannot express, and serving needs no package of the tuner.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from outrider.draft.layerskip.options import LayerSkipOptions
from outrider.draft.layerskip.sets import Skip

KAPPA, NOISE = 2.5, 1e-2  # of the published Bayesian optimization
CANDIDATES = 256  # random sets that a Bayesian suggestion is chosen from
HISTORY = 512  # trials that it is based on


@dataclass
class Search:
    """The best set so far, and the trials.  Candidates skip `size` sublayers between the first and the last
    layer.

    score: of the best set.  idle: trials since the best one.  steps: decode steps during the search.
    """

    layers: int
    size: int
    best: Skip
    options: LayerSkipOptions
    score: float = -1.0
    idle: int = 0
    steps: int = 0
    tried: list[Skip] = field(default_factory=list)
    scores: list[float] = field(default_factory=list)
    rng: random.Random = field(default_factory=lambda: random.Random(0))

    @property
    def done(self) -> bool:
        options = self.options
        ended = self.idle >= options.max_tolerance_iter or len(self.scores) >= options.max_opt_iter
        return ended or self.score > options.max_score

    def suggest(self) -> Skip:
        """The next candidate: the initial set, then random ones, each bayes_interval-th by the process."""
        count = len(self.scores)
        if not count:
            return self.best
        return self._bayesian() if count % self.options.bayes_interval == 0 else self._random()

    def learn(self, skip: Skip, score: float) -> None:
        self.tried.append(skip)
        self.scores.append(score)
        self.idle += 1
        if score > self.score:
            self.best, self.score, self.idle = skip, score, 0

    def _random(self) -> Skip:
        sublayers = [(kind, i) for kind in ("attention", "mlp") for i in range(1, self.layers - 1)]
        skipped = self.rng.sample(sublayers, self.size)
        attention = sorted(i for kind, i in skipped if kind == "attention")
        mlp = sorted(i for kind, i in skipped if kind == "mlp")
        return Skip(tuple(attention), tuple(mlp))

    def _bayesian(self) -> Skip:
        """The random set with the highest upper confidence bound of a Gaussian process over past trials."""
        candidates = [self._random() for _ in range(CANDIDATES)]
        tried = np.array([self._switches(skip) for skip in self.tried[-HISTORY:]])
        new = np.array([self._switches(skip) for skip in candidates])
        scores = np.array(self.scores[-HISTORY:])
        scores = (scores - scores.mean()) / (scores.std() or 1.0)
        covariance = _kernel(tried, tried) + NOISE * np.eye(len(tried))
        cross = _kernel(tried, new)
        solved = np.linalg.solve(covariance, np.column_stack([scores, cross]))
        mean = cross.T @ solved[:, 0]
        deviation = np.sqrt(np.maximum(1 - (cross * solved[:, 1:]).sum(0), 0))
        return candidates[int(np.argmax(mean + KAPPA * deviation))]

    def _switches(self, skip: Skip) -> list[float]:
        """A set as 2 · layers numbers: 1.0 where a sublayer is skipped."""
        return [float(i in part) for part in (skip.attention, skip.mlp) for i in range(self.layers)]


def _kernel(a: NDArray[np.float64], b: NDArray[np.float64]) -> NDArray[np.float64]:
    """exp(-4 · share of the switches that differ) of every pair, [len(a), len(b)]."""
    different = a.sum(1)[:, None] + b.sum(1)[None] - 2 * a @ b.T
    return np.asarray(np.exp(-4 * different / a.shape[1]))
