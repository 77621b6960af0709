"""Exact output distribution of a verification rule, by enumeration of every random choice.

The rule and the code that draws draft tokens run unchanged. Only the random streams are replaced: each choice
is taken every way, weighted by its probability. Vocabularies of 4 and depths of 3 take well under a second.

    emissions = enumerate_rule(rule("rejection")(), lambda models: DraftTree.chain([0, 2], [0.5, 0.5]))
    assert emissions.error() < 1e-12
"""

from __future__ import annotations

import itertools
import math
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from unittest.mock import patch

import torch
from torch import Tensor

from outrider.core.row import Row
from outrider.core.step import Batch, RowStep
from outrider.core.tree import DraftTree
from outrider.sampling import random_streams
from outrider.sampling.random_streams import normal
from outrider.testing.rows import make_row
from outrider.verify.base import Rule

Tokens = tuple[int, ...]


class Choices:
    """Depth-first walk over all sequences of choices. `weight`: the probability of the current sequence."""

    def __init__(self) -> None:
        self.weight = 1.0
        self._script: list[int] = []  # which way each choice of the current sequence takes
        self._ways: list[int] = []  # how many ways each of them has
        self._position = 0

    def choose(self, probabilities: Sequence[float]) -> int:
        """The next choice of the current sequence: an index of positive probability."""
        ways = [i for i, p in enumerate(probabilities) if p > 0]
        if self._position == len(self._script):
            self._script.append(0)
            self._ways.append(len(ways))
        way = ways[self._script[self._position]]
        self._position += 1
        self.weight *= probabilities[way] / sum(probabilities)
        return way

    def sequences(self) -> Iterator[None]:
        """One iteration for each sequence; the loop body makes its choices through `choose`."""
        while True:
            self._position, self.weight = 0, 1.0
            yield
            while self._script and self._script[-1] + 1 == self._ways[-1]:
                self._script.pop()
                self._ways.pop()
            if not self._script:
                return
            self._script[-1] += 1


class RandomModels:
    """A random target "p" and random drafts over a vocabulary: distributions as functions of the path.

    Implements `Picker` for one row, with every random choice made by `choices`. A third of the distributions
    has a token of probability zero, as top-p sampling makes them. Override `distribution` for given models,
    and `row` for one with a grammar.
    """

    def __init__(self, vocabulary: int, seed: int = 0) -> None:
        self.vocabulary, self.seed, self.choices = vocabulary, seed, Choices()
        self._known: dict[tuple[str, Tokens], Tensor] = {}

    def distribution(self, model: str, path: Sequence[int]) -> Tensor:
        """Next-token probabilities of a model ("p", "q" or any other name) after `path`: float64 [V]."""
        key = model, tuple(path)
        if key not in self._known:
            rng = torch.Generator().manual_seed(zlib.crc32(repr((self.seed, key)).encode()))
            mass = torch.rand(self.vocabulary, generator=rng, dtype=torch.float64) ** 2
            if torch.rand((), generator=rng) < 0.3:
                mass[mass.argmin()] = 0.0
            self._known[key] = normal(mass)
        return self._known[key]

    def row(self) -> Row:
        """The row of a step, made anew for each sequence of choices, before its tree."""
        return make_row([1, 2])

    def p(self, row: int, node: int, path: Sequence[int]) -> Tensor:
        return self.distribution("p", path)

    def pick(self, row: int, node: int, path: Sequence[int]) -> int:
        return self.choices.choose(self.distribution("p", path).tolist())

    def accept(self, row: int, node: int, probability: float) -> bool:
        probability = min(1.0, max(0.0, probability))
        return self.choices.choose([probability, 1 - probability]) == 0

    def draw(self, row: int, node: int, distribution: Tensor) -> int:
        return self.choices.choose(distribution.tolist())


@dataclass
class Emissions:
    """Probability of everything that one step may emit."""

    models: RandomModels
    probabilities: dict[Tokens, float]

    @property
    def mean_tokens(self) -> float:
        """Expected number of emitted tokens, the bonus token included."""
        return sum(len(tokens) * weight for tokens, weight in self.probabilities.items())

    def error(self) -> float:
        """Largest error in the probability of a text.

        Compares this step followed by plain decoding with plain decoding alone. A lossless rule has rounding
        errors only.
        """
        depth = max(map(len, self.probabilities))
        worst = abs(sum(self.probabilities.values()) - 1)
        for text in itertools.product(range(self.models.vocabulary), repeat=depth):
            plain = [float(self.models.distribution("p", text[:i])[text[i]]) for i in range(depth)]
            step = sum(
                self.probabilities.get(text[:n], 0.0) * math.prod(plain[n:]) for n in range(1, depth + 1)
            )
            worst = max(worst, abs(step - math.prod(plain)))
        return worst


def enumerate_rule(
    rule: Rule,
    propose: Callable[[RandomModels], DraftTree],
    vocabulary: int = 3,
    seed: int = 0,
    models: RandomModels | None = None,
) -> Emissions:
    """All possible outputs of a step with this rule, with probabilities.

    propose: builds the draft tree. It may draw tokens with `random_streams.children` or a drafter's own code;
    these draws are enumerated, too. models: instead of random ones of this vocabulary and seed.
    """
    models = RandomModels(vocabulary, seed) if models is None else models
    probabilities: dict[Tokens, float] = defaultdict(float)

    def enumerated_index(distribution: Tensor, uniform: float) -> int:
        return models.choices.choose(distribution.tolist())

    with patch.object(random_streams, "index", enumerated_index):
        for _ in models.choices.sequences():
            step = RowStep(models.row(), 1, 1, tree=propose(models))
            rule(Batch([step]), models)
            if step.row.error is not None:
                raise step.row.error
            more = len(step.emitted) - len(step.accepted)
            assert more == 1 or step.row.grammar, (
                "accepted tokens and one more, unless a grammar ends the step"
            )
            probabilities[tuple(step.emitted)] += models.choices.weight
    return Emissions(models, dict(probabilities))
