"""`enumerate_rule` finds the exact distribution of what a rule emits, and finds rules that change it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from outrider import RequestError
from outrider.core.tree import ROOT, DraftTree
from outrider.sampling import random_streams
from outrider.testing import Choices, RandomModels, enumerate_rule, make_row
from outrider.verify import rule
from outrider.verify.base import RowPicker, Rule


def sampled_chain(models: RandomModels) -> DraftTree:
    """One token drawn from q."""
    q = models.distribution("q", ())
    tokens = random_streams.children(make_row([1, 2]), q, range(1))
    return DraftTree(tokens, [ROOT], [0.5], [q], [0])


class AcceptAlways(Rule):
    """A lossy rule: every first child is accepted."""

    def walk(self, tree: DraftTree, target: RowPicker) -> tuple[list[int], list[int]]:
        tokens = tree.tokens[:1]
        return [0][: len(tokens)], [*tokens, target.draw(0, target.p(0, tokens))]


def test_choices_visit_every_sequence_once_with_its_probability() -> None:
    choices, found = Choices(), dict[tuple[int, ...], float]()
    for _ in choices.sequences():
        first = choices.choose([0.25, 0.0, 0.75])
        second = choices.choose([0.5, 0.5]) if first else 9
        assert (first, second) not in found
        found[first, second] = choices.weight
    assert found == {(0, 9): 0.25, (2, 0): 0.375, (2, 1): 0.375}


@pytest.mark.parametrize("seed", range(3))
def test_lossless_rule_has_only_rounding_error(seed: int) -> None:
    emissions = enumerate_rule(rule("rejection")(), sampled_chain, seed=seed)
    assert sum(emissions.probabilities.values()) == pytest.approx(1, abs=1e-12)
    assert emissions.error() < 1e-12
    assert 1 < emissions.mean_tokens <= 2


def test_acceptance_is_one_minus_total_variation() -> None:
    emissions = enumerate_rule(rule("rejection")(), sampled_chain)
    p, q = (emissions.models.distribution(name, ()) for name in "pq")
    assert emissions.mean_tokens - 1 == pytest.approx(float(torch.minimum(p, q).sum()), abs=1e-12)


def test_lossy_rule_has_an_error() -> None:
    emissions = enumerate_rule(AcceptAlways(), sampled_chain)
    assert emissions.error() > 1e-3
    assert emissions.mean_tokens == pytest.approx(2)


def test_given_models_replace_random_ones() -> None:
    class Certain(RandomModels):
        def distribution(self, model: str, path: tuple[int, ...]) -> Tensor:  # type: ignore[override]
            return torch.tensor([0.0, 1.0], dtype=torch.float64)

    emissions = enumerate_rule(rule("match")(), sampled_chain, models=Certain(2))
    assert emissions.probabilities == {(1, 1): 1.0}


def test_error_of_a_rule_is_raised() -> None:
    class Failing(RandomModels):
        def p(self, row: int, node: int, path: object) -> Tensor:
            raise RequestError("no such path")

    with pytest.raises(RequestError, match="no such path"):
        enumerate_rule(rule("rejection")(), sampled_chain, models=Failing(3))
    assert random_streams.index.__module__ == "outrider.sampling.random_streams", "the real stream is back"
