"""Exact distributions of short texts under sampling parameters, and chi-square tests against them."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.stats import chi2

from outrider import LLM
from outrider.core.step_input import StepInput

VOCABULARY, TOKENS, DEPTH, SEATS, SAMPLES = 10, 3, 3, 16, 16
PROMPTS = ((3, 1, 4), (1, 5, 9, 2, 6, 5, 3))
LEAST, BINS = 5.0, 8  # expected samples of a cell; cells by likelihood


# ---- the exact distribution


class Exact:
    """The joint distribution of the first tokens after a prompt."""

    def __init__(self, llm: LLM) -> None:
        self.decoder, self.known = llm.engine.decoder, dict[tuple[int, ...], np.ndarray]()
        self.joints = dict[str, np.ndarray]()

    def logits(self, ids: tuple[int, ...]) -> np.ndarray:
        if ids not in self.known:
            x = self.decoder.forward(StepInput.of_ids(ids), self.decoder.pool(len(ids)))
            self.known[ids] = self.decoder.logits(x, [len(ids) - 1])[0].double().numpy()
        return self.known[ids]

    def joint(self, ask: Mapping[str, Any]) -> np.ndarray:
        """[prompts, V, V, V]."""
        if (key := repr(ask)) not in self.joints:
            self.joints[key] = np.stack([self._joint(prompt, ask) for prompt in PROMPTS])
        return self.joints[key]

    def _joint(self, prompt: tuple[int, ...], ask: Mapping[str, Any]) -> np.ndarray:
        made = np.zeros((VOCABULARY,) * TOKENS)
        for emitted in itertools.product(range(VOCABULARY), repeat=TOKENS - 1):
            share = math.prod(
                self.distribution(prompt, emitted[:i], ask)[token] for i, token in enumerate(emitted)
            )
            if share > 0:
                made[emitted] = share * self.distribution(prompt, emitted, ask)
        assert abs(made.sum() - 1) < 1e-9
        return made

    def distribution(
        self, prompt: tuple[int, ...], emitted: tuple[int, ...], ask: Mapping[str, Any]
    ) -> np.ndarray:
        x = self.logits(prompt + emitted).copy()
        for token, bias in ask.get("logit_bias", {}).items():
            x[token] += bias
        for token in {*prompt, *emitted}:
            factor = ask.get("repetition_penalty", 1.0)
            x[token] = x[token] / factor if x[token] > 0 else x[token] * factor
        for token, count in Counter(emitted).items():
            x[token] -= ask.get("frequency_penalty", 0.0) * count + ask.get("presence_penalty", 0.0)
        p = np.exp((x - x.max()) / ask["temperature"])
        p[p < ask.get("min_p", 0.0)] = 0
        p[np.argsort(-p)[ask.get("top_k", VOCABULARY) :]] = 0
        p /= p.sum()
        order = np.argsort(-p)
        p[order[np.cumsum(p[order]) - p[order] >= ask.get("top_p", 1.0)]] = 0
        return p / p.sum()


# ---- the engine's samples, and the test


@dataclass
class Counted:
    """Samples of one kind of request, and three distributions [prompts, V, V, V].

    distribution: the target's.  bare: with all parameters but the temperature ignored.  asked: with all of
    them ignored.
    """

    distribution: np.ndarray
    asked: np.ndarray
    bare: np.ndarray
    counts: np.ndarray

    @property
    def expected(self) -> np.ndarray:
        return self.distribution * self.counts.sum(axis=(1, 2, 3), keepdims=True)

    def by_outcome(self) -> tuple[float, int]:
        """Counts of texts; rare outcomes are joined with their neighbours."""
        return chi_square(self.counts.ravel(), self.expected.ravel(), LEAST)

    def by_likelihood(self) -> tuple[float, int]:
        """A few cells, from what the parameters make likeliest to what they make least likely."""
        order = np.argsort(-(self.asked / self.bare).ravel(), kind="stable")
        return chi_square(self.counts.ravel()[order], self.expected.ravel()[order], self.counts.sum() / BINS)


def chi_square(counts: np.ndarray, expected: np.ndarray, least: float) -> tuple[float, int]:
    """The chi-square statistic and its degrees of freedom.

    Cells that expect fewer than `least` samples are joined with others.
    """
    if counts[expected == 0].any():
        return math.inf, 1  # an impossible token was emitted
    cells: list[tuple[float, float]] = []
    seen = wanted = 0.0
    for count, mean in zip(counts.tolist(), expected.tolist()):
        if mean >= least:
            cells.append((count, mean))
            continue
        seen, wanted = seen + count, wanted + mean
        if wanted >= least:
            cells.append((seen, wanted))
            seen = wanted = 0.0
    cells[-1] = (cells[-1][0] + seen, cells[-1][1] + wanted)
    return sum((count - mean) ** 2 / mean for count, mean in cells), len(cells) - 1


def p_values(samples: Sequence[Counted]) -> list[float]:
    """Of each sample in both ways, and last of all of them as one."""
    found = [sample.by_outcome() for sample in samples]
    whole = (sum(statistic for statistic, _ in found), sum(freedom for _, freedom in found))
    return [float(chi2.sf(*one)) for one in (*found, *(sample.by_likelihood() for sample in samples), whole)]
