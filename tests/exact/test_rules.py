"""Every lossless rule emits the target's distribution, by exact enumeration of all random choices.

`outrider.testing.enumerate_rule` takes each choice of the draft and of the rule every way, with its
probability.  The draft trees come from the engine's own code.  Vocabulary <= 4, depth <= 3, error <= 1e-12.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from outrider import verify
from outrider.core.step import Batch, RowStep
from outrider.core.tree import ROOT, Budget, DraftTree
from outrider.drafting.trees.sampled import Tree
from outrider.drafting.view import View
from outrider.sampling import random_streams
from outrider.testing import Emissions, RandomModels, enumerate_rule, make_row
from outrider.verify import rejection, spectr, traversal

SEEDS = range(4)
Drafting = Callable[[RandomModels], DraftTree]


def sampled(
    depth: int, siblings: int, draws: str = "without", nodes: int = 99, last: int | None = None
) -> Drafting:
    """The tree of a draft model that samples from q.  Nothing is drafted after the token `last`."""

    def draft(models: RandomModels) -> DraftTree:
        tree = Tree(make_row([1, 2]), 2, Budget(depth, nodes), siblings, draws, view=View(array("i")))
        while tree.growing:
            tree.draw({node: models.distribution("q", tree.path_tokens(node)) for node in tree.frontier})
            tree.frontier = [node for node in tree.frontier if tree.tokens[node] != last]
        return tree.draft_tree

    return draft


def chosen(tokens: list[int], parents: list[int]) -> Drafting:
    return lambda models: DraftTree(tokens, parents, [0.5] * len(tokens))


def mixed(order: tuple[str, ...]) -> Drafting:
    """Samples of two distributions and a chosen token at the root, in some order, and a child of each.

    order: "a" and "b" are samples of these distributions, "c" is the chosen token.
    """

    def draft(models: RandomModels) -> DraftTree:
        distributions = [models.distribution("q", ()), models.distribution("other", ())]
        tokens, probs_of, left = [], [], list(distributions)
        for kind in order:
            at = "ab".find(kind)
            token = 1 if at < 0 else random_streams.children(make_row([1, 2]), left[at], range(1))[0]
            if at >= 0:
                left[at] = random_streams.without(left[at], token)
            tokens.append(token)
            probs_of.append(at)
        parents = [ROOT] * len(order)
        for node in range(len(order)):
            parents.append(node)
            if node % 2:
                tokens.append(0)
                probs_of.append(-1)
            else:
                distributions.append(models.distribution("q", (tokens[node],)))
                tokens += random_streams.children(make_row([1, 2]), distributions[-1], range(1))
                probs_of.append(len(distributions) - 1)
        return DraftTree(tokens, parents, [0.5] * len(tokens), distributions, probs_of)

    return draft


CHAINS = {
    "nothing": chosen([], []),
    "chain": sampled(3, 1),
    "stopped chain": sampled(3, 1, last=1),
    "chosen chain": chosen([0, 2, 1], [-1, 0, 1]),
}
TREES = {
    "without replacement": sampled(2, 2),
    "three without replacement": sampled(2, 3),
    "as many as there are": sampled(1, 4),
    "independent": sampled(2, 2, "independent"),
    "three independent": sampled(2, 3, "independent", nodes=5),
    "greedy": sampled(2, 2, "greedy"),
    "three greedy": sampled(2, 3, "greedy"),
    "greedy, as many as there are": sampled(1, 4, "greedy"),
    "stopped tree": sampled(2, 2, last=1),
    "chosen tree": chosen([0, 2, 1, 1, 0], [-1, -1, 0, 0, 1]),
    "mixed": mixed(("c", "a", "b")),
    "mixed, chosen last": mixed(("a", "a", "c")),
}
CASES = [(name, case) for name in ("rejection", "traversal", "spectr") for case in (*CHAINS, *TREES)] + [
    ("block", case) for case in CHAINS
]


def emissions(name: str, drafting: Drafting, vocabulary: int = 3, seed: int = 0) -> Emissions:
    return enumerate_rule(verify.rule(name)(), drafting, vocabulary, seed)


@pytest.mark.parametrize(("name", "case"), CASES)
def test_emitted_tokens_have_the_targets_distribution(name: str, case: str) -> None:
    vocabulary, drafting = 4 if case.endswith("as many as there are") else 3, (CHAINS | TREES)[case]
    found = [emissions(name, drafting, vocabulary, seed) for seed in SEEDS]
    assert max(one.error() for one in found) <= 1e-12
    assert case == "nothing" or max(one.mean_tokens for one in found) > 1.2, "nothing is ever accepted"


@pytest.mark.parametrize("seed", SEEDS)
def test_block_and_traversal_accept_more_than_rejection(seed: int) -> None:
    def mean_tokens(name: str, drafting: Drafting) -> float:
        return emissions(name, drafting, seed=seed).mean_tokens

    chain, tree = sampled(3, 1), sampled(2, 2)
    assert mean_tokens("block", chain) == pytest.approx(mean_tokens("traversal", chain), abs=1e-12)
    assert mean_tokens("block", chain) >= mean_tokens("rejection", chain) - 1e-12
    assert mean_tokens("traversal", tree) >= mean_tokens("rejection", tree) - 1e-12


class Fixed(RandomModels):
    """A target p and a draft q that are the same after any text."""

    def __init__(self, p: Sequence[float], q: Sequence[float]) -> None:
        super().__init__(len(p))
        self.fixed = {"p": torch.tensor(p, dtype=torch.float64), "q": torch.tensor(q, dtype=torch.float64)}

    def distribution(self, model: str, path: Sequence[int]) -> Tensor:
        return self.fixed[model]


@pytest.mark.parametrize("count", [2, 3])
def test_spectr_accepts_as_in_the_paper(count: int) -> None:
    """1 - (1 - β)^k with (1 - (1 - β)^k) = ρβ, which is more than successive rejection here.

    p = (1/2, 1/2), q = (1, 0): token 0 is accepted with its whole probability, 1/2.
    p = (1/3, 2/3), q = (2/3, 1/3), k = 2: (2 - β) = ρ, β = 1/3 + 1/(3ρ) solve to ρ = (5/3 + sqrt(13/9)) / 2.
    """
    certain = Fixed([0.5, 0.5], [1.0, 0.0])
    found = enumerate_rule(verify.rule("spectr")(), sampled(1, count, "independent"), models=certain)
    assert found.mean_tokens - 1 == pytest.approx(0.5, abs=1e-8)
    if count == 2:
        pair = Fixed([1 / 3, 2 / 3], [2 / 3, 1 / 3])
        rho = (5 / 3 + (13 / 9) ** 0.5) / 2
        beta = 2 - rho
        found = enumerate_rule(verify.rule("spectr")(), sampled(1, 2, "independent"), models=pair)
        assert found.mean_tokens - 1 == pytest.approx(1 - (1 - beta) ** 2, abs=1e-8)


def test_spectr_reads_a_shared_distribution_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies of one tensor from a device would be different ones, to be compared number by number."""
    q, read = torch.tensor([0.25, 0.75, 0.0], dtype=torch.float64), list[int]()
    other, equal = torch.tensor([0.5, 0.5, 0.0], dtype=torch.float64), q.clone()
    tree = DraftTree([0, 1, 1, 0, 1], [-1] * 5, [1.0] * 5, [q, other, equal], [0, 0, 0, 1, 2], repeats=True)

    def q_of(tree: DraftTree, node: int) -> torch.Tensor | None:
        read.append(node)
        found = tree.distribution(node)
        return None if found is None else found.clone()

    monkeypatch.setattr(spectr, "q_of", q_of)
    found = spectr._common(tree, [0, 1, 2])
    assert found is not None and found.equal(q) and read == [0]
    assert spectr._common(tree, [0, 3]) is None
    assert spectr._common(tree, [0, 4]) is not None
    assert spectr._common(tree._replace(probs_of=[0, -1, 0, 1, 2]), [0, 1]) is None
    assert spectr._common(tree._replace(probs_of=[]), [0, 1]) is None


def test_spectr_continues_after_all_siblings_with_the_accepted_token() -> None:
    """Two equal samples, of which the second has a child."""
    models = Fixed([1.0, 0.0], [1.0, 0.0])
    q = [models.distribution("q", ())] * 2
    tree = DraftTree([0, 0, 0], [ROOT, ROOT, 1], [0.5] * 3, q, [0, 0, 1], repeats=True)
    step = RowStep(make_row([1, 2]), 1, 1, tree=tree)
    for _ in models.choices.sequences():
        verify.rule("spectr")()(Batch([step]), models)
    assert (step.accepted, step.emitted) == ([1, 2], [0, 0, 0])


@pytest.mark.parametrize("name", ["rejection", "traversal"])
@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("seed", SEEDS)
def test_greedy_siblings_are_accepted_as_often_as_any_rule_can(seed: int, count: int, name: str) -> None:
    """The likeliest tokens with p, and the others with min(p, q of the others)."""
    found = emissions(name, sampled(1, count, "greedy"), 4, seed)
    p, q = found.models.distribution("p", ()), found.models.distribution("q", ())
    likeliest = q.topk(count - 1).indices
    rest = q.index_fill(0, likeliest, 0.0)
    optimum = p[likeliest].sum() + torch.minimum(p, rest / rest.sum()).sum()
    assert found.mean_tokens - 1 == pytest.approx(float(optimum), abs=1e-12)


@pytest.mark.parametrize(("name", "accepted"), [("rejection", 10 / 9), ("block", 11 / 9)])
def test_block_verification_accepts_as_in_the_paper(name: str, accepted: float) -> None:
    """Sun et al., section 2: two tokens with p = (1/3, 2/3) and q = (2/3, 1/3)."""

    example = Fixed([1 / 3, 2 / 3], [2 / 3, 1 / 3])
    found = enumerate_rule(verify.rule(name)(), sampled(2, 1), models=example)
    assert found.mean_tokens - 1 == pytest.approx(accepted, abs=1e-12)


@pytest.mark.parametrize("name", ["rejection", "block", "traversal"])
@pytest.mark.parametrize("tokens", [[0, 2, 1], [2, 0], [0, 1, 2]])
def test_paths_after_an_impossible_token_are_not_evaluated(name: str, tokens: list[int]) -> None:
    """A processor may raise on a text that it forbids, as those of grammars do."""

    class Forbidding(RandomModels):
        def distribution(self, model: str, path: Sequence[int]) -> Tensor:
            assert model == "q" or 2 not in path, "this text was forbidden"
            found = super().distribution(model, path)
            return random_streams.without(found, 2) if model == "p" else found

    enumerate_rule(verify.rule(name)(), chosen(tokens, [*range(-1, len(tokens) - 1)]), models=Forbidding(3))


def test_traversal_walks_a_chain_of_2000_nodes() -> None:
    models = Fixed([1.0, 0.0], [1.0, 0.0])
    step = RowStep(make_row([1, 2]), 1, 1, tree=DraftTree.chain([0] * 2000, [0.5] * 2000))
    for _ in models.choices.sequences():
        verify.rule("traversal")()(Batch([step]), models)
    assert len(step.emitted) == 2001


def test_block_ignores_nodes_outside_the_chain() -> None:
    for tree in (chosen([0, 2, 1], [-1, -1, 1]), chosen([0, 2, 1, 1], [-1, 0, 0, 1]), sampled(2, 2)):
        assert max(emissions("block", tree, seed=seed).error() for seed in SEEDS) <= 1e-12


# ---- what must be detected


def test_typical_acceptance_is_not_lossless() -> None:
    assert not verify.rule("typical").lossless
    assert emissions("typical", sampled(2, 2)).error() > 1e-3


@pytest.mark.parametrize("module", [rejection, traversal])
def test_a_wrong_residual_is_detected(module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a rejection the token comes from p itself."""
    monkeypatch.setattr(
        module, "residual", lambda p, q, scale=1.0: (p, float((scale * p - q).clamp_min(0).sum()))
    )
    assert emissions(module.__name__.rpartition(".")[2], sampled(2, 2)).error() > 1e-3


def test_a_wrong_rest_of_spectr_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is left of p after as many samples as there are, not after those that are looked at."""
    monkeypatch.setattr(spectr, "_expected", lambda beta, count: float(count))
    errors = [emissions("spectr", sampled(1, 2, "independent"), seed=seed).error() for seed in SEEDS]
    assert max(errors) > 1e-3


@pytest.mark.parametrize("name", ["rejection", "spectr"])
def test_samples_without_replacement_verified_as_independent_are_detected(name: str) -> None:
    def draft(models: RandomModels) -> DraftTree:
        return sampled(2, 2)(models)._replace(repeats=True)

    assert max(emissions(name, draft, seed=seed).error() for seed in SEEDS) > 1e-3


def test_dropping_a_sample_because_of_its_token_is_detected() -> None:
    def draft(models: RandomModels) -> DraftTree:
        tree = sampled(1, 2)(models)
        return tree.only([i for i, token in enumerate(tree.tokens) if token != 0])

    assert emissions("rejection", draft).error() > 1e-3


def test_ordering_samples_by_their_tokens_is_detected() -> None:
    def draft(models: RandomModels) -> DraftTree:
        """The likelier of two samples goes first: it was not sampled from the q that it is verified with."""
        tree, p = sampled(1, 2)(models), models.distribution("p", ())
        return tree._replace(tokens=sorted(tree.tokens, key=lambda token: -float(p[token])))

    assert emissions("rejection", draft).error() > 1e-3
