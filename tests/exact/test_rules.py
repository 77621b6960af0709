"""Every lossless rule, by exact enumeration: over all that a draft can draw and a rule can decide, what is emitted has the target's law.

The engine's own code runs (the tree of a draft model, the draws, the rule); only the dice are replaced: each choice is taken
every way, with its probability.  Vocabulary <= 4, depth <= 3, error <= 1e-12.
"""

from __future__ import annotations

import itertools
import zlib
from array import array
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
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
from outrider.sampling.random_streams import normal
from outrider.testing import make_row
from outrider.verify import rejection, traversal
from outrider.verify.base import Rule

SEEDS = range(4)
Path_ = tuple[int, ...]


class Choices:
    """Runs through every sequence of choices; `weight` is the probability of the one that is being made."""

    def __init__(self) -> None:
        self.script: list[int] = []
        self.open: list[int] = []  # how many ways each choice of the script had
        self.at, self.weight = 0, 1.0

    def choose(self, probabilities: Sequence[float]) -> int:
        ways = [i for i, p in enumerate(probabilities) if p > 0]
        if self.at == len(self.script):
            self.script.append(0)
            self.open.append(len(ways))
        way = ways[self.script[self.at]]
        self.at += 1
        self.weight *= probabilities[way] / sum(probabilities)
        return way

    def runs(self) -> Iterator[None]:
        while True:
            self.at, self.weight = 0, 1.0
            yield
            while self.script and self.script[-1] + 1 == self.open[-1]:
                self.script.pop()
                self.open.pop()
            if not self.script:
                return
            self.script[-1] += 1


class World:
    """A random target p and draft q over a vocabulary, as functions of the path; and the dice."""

    def __init__(self, vocabulary: int, seed: int, choices: Choices) -> None:
        self.vocabulary, self.seed, self.choices = vocabulary, seed, choices
        self.known: dict[tuple[str, Path_], Tensor] = {}

    def distribution(self, who: str, path: Sequence[int]) -> Tensor:
        key = who, tuple(path)
        if key not in self.known:
            random = torch.Generator().manual_seed(zlib.crc32(repr((self.seed, key)).encode()))
            mass = torch.rand(self.vocabulary, generator=random, dtype=torch.float64) ** 2
            if torch.rand((), generator=random) < 0.3:  # laws with holes, as top-p makes them
                mass[mass.argmin()] = 0.0
            self.known[key] = normal(mass)
        return self.known[key]

    def p(self, row: int, node: int, path: Sequence[int]) -> Tensor:
        return self.distribution("p", path)

    def pick(self, row: int, node: int, path: Sequence[int]) -> int:
        return self.choices.choose(self.distribution("p", path).tolist())

    def accept(self, row: int, node: int, probability: float) -> bool:
        chance = min(1.0, max(0.0, probability))
        return self.choices.choose([chance, 1 - chance]) == 0

    def draw(self, row: int, node: int, distribution: Tensor) -> int:
        return self.choices.choose(distribution.tolist())


Drafting = Callable[[World], DraftTree]


def drawn(
    depth: int, siblings: int, repeats: bool = False, nodes: int = 99, last: int | None = None
) -> Drafting:
    """A tree as a draft model grows it under rules that judge guesses by their laws; nothing is drawn behind the token `last`."""

    def draft(world: World) -> DraftTree:
        tree = Tree(make_row([1, 2]), 2, Budget(depth, nodes), siblings, View(array("i")), repeats)
        while tree.growing:
            tree.draw({node: world.distribution("q", tree.path_tokens(node)) for node in tree.frontier})
            tree.frontier = [node for node in tree.frontier if tree.tokens[node] != last]
        return tree.draft_tree

    return draft


def chosen(tokens: list[int], parents: list[int]) -> Drafting:
    return lambda world: DraftTree(tokens, parents, [0.5] * len(tokens))


def mixed(order: tuple[str, ...]) -> Drafting:
    """At the root two draws from one law, one from another and a chosen token, in some order; a draw or a choice below each."""

    def draft(world: World) -> DraftTree:
        distributions = [world.distribution("q", ()), world.distribution("other", ())]
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
                distributions.append(world.distribution("q", (tokens[node],)))
                tokens += random_streams.children(make_row([1, 2]), distributions[-1], range(1))
                probs_of.append(len(distributions) - 1)
        return DraftTree(tokens, parents, [0.5] * len(tokens), distributions, probs_of)

    return draft


CHAINS = {
    "nothing": chosen([], []),
    "chain": drawn(3, 1),
    "stopped chain": drawn(3, 1, last=1),
    "chosen chain": chosen([0, 2, 1], [-1, 0, 1]),
}
TREES = {
    "without replacement": drawn(2, 2),
    "three without replacement": drawn(2, 3),
    "as many as there are": drawn(1, 4),
    "independent": drawn(2, 2, repeats=True),
    "stopped tree": drawn(2, 2, last=1),
    "chosen tree": chosen([0, 2, 1, 1, 0], [-1, -1, 0, 0, 1]),
    "mixed": mixed(("c", "a", "b")),
    "mixed, chosen last": mixed(("a", "a", "c")),
}
CASES = [(name, case) for name in ("rejection", "traversal") for case in (*CHAINS, *TREES)] + [
    ("block", case) for case in CHAINS
]


def judged(rule: Rule, tree: DraftTree, world: World) -> RowStep:
    """What the rule makes of the tree of a row."""
    step = RowStep(make_row([1, 2]), 1, 1, tree=tree)
    rule(Batch([step]), world)
    return step


def emitted(
    rule: Rule, drafting: Drafting, vocabulary: int, seed: int, monkeypatch: pytest.MonkeyPatch
) -> tuple[World, dict[Path_, float]]:
    """The probability of everything that a step may emit."""
    choices = Choices()
    world = World(vocabulary, seed, choices)
    monkeypatch.setattr(
        random_streams, "index", lambda distribution, uniform: choices.choose(distribution.tolist())
    )
    said: dict[Path_, float] = defaultdict(float)
    for _ in choices.runs():
        step = judged(rule, drafting(world), world)
        assert step.row.error is None
        assert len(step.emitted) == len(step.accepted) + 1
        said[tuple(step.emitted)] += choices.weight
    return world, said


def error(world: World, said: dict[Path_, float]) -> float:
    """The largest difference between the law of what is said, with plain decoding after it, and plain decoding's."""
    depth = max(map(len, said))
    worst = abs(sum(said.values()) - 1)
    for text in itertools.product(range(world.vocabulary), repeat=depth):
        plain = [float(world.distribution("p", text[:i])[text[i]]) for i in range(depth)]
        ours = sum(said.get(text[:n], 0.0) * _product(plain[n:]) for n in range(1, depth + 1))
        worst = max(worst, abs(ours - _product(plain)))
    return worst


def _product(factors: Sequence[float]) -> float:
    return float(torch.tensor([1.0, *factors], dtype=torch.float64).prod())


@pytest.mark.parametrize(("name", "case"), CASES)
def test_what_is_emitted_has_the_targets_law(name: str, case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    lengths = []
    for seed in SEEDS:
        world, said = emitted(
            verify.rule(name)(),
            (CHAINS | TREES)[case],
            4 if case == "as many as there are" else 3,
            seed,
            monkeypatch,
        )
        assert error(world, said) <= 1e-12
        lengths.append(sum(len(text) * weight for text, weight in said.items()))
    assert case == "nothing" or max(lengths) > 1.2, "nothing is ever accepted"


@pytest.mark.parametrize("seed", SEEDS)
def test_block_and_traversal_accept_more_than_token_by_token(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def length(name: str, drafting: Drafting) -> float:
        _, said = emitted(verify.rule(name)(), drafting, 3, seed, monkeypatch)
        return sum(len(text) * weight for text, weight in said.items())

    chain = drawn(3, 1)
    assert length("block", chain) == pytest.approx(length("traversal", chain), abs=1e-12)
    assert length("block", chain) >= length("rejection", chain) - 1e-12
    assert length("traversal", drawn(2, 2)) >= length("rejection", drawn(2, 2)) - 1e-12


def test_the_example_of_block_verification(monkeypatch: pytest.MonkeyPatch) -> None:
    """p = (1/3, 2/3), q = (2/3, 1/3), two tokens: 10/9 are accepted token by token, 11/9 as a block (Sun et al., section 2)."""

    def distribution(self: World, who: str, path: Sequence[int]) -> Tensor:
        return torch.tensor([1.0, 2.0] if who == "p" else [2.0, 1.0], dtype=torch.float64) / 3

    monkeypatch.setattr(World, "distribution", distribution)
    for name, accepted in (("rejection", 10 / 9), ("block", 11 / 9)):
        _, said = emitted(verify.rule(name)(), drawn(2, 1), 2, 0, monkeypatch)
        assert sum((len(text) - 1) * weight for text, weight in said.items()) == pytest.approx(
            accepted, abs=1e-12
        )


@pytest.mark.parametrize("name", ["rejection", "block", "traversal"])
def test_nothing_is_asked_behind_a_guess_that_cannot_be_right(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A processor may raise on a text that it forbids, as those of grammars do."""
    distribution = World.distribution

    def picky(self: World, who: str, path: Sequence[int]) -> Tensor:
        assert who == "q" or 2 not in path, "this text was forbidden"
        found = distribution(self, who, path)
        return random_streams.without(found, 2) if who == "p" else found

    monkeypatch.setattr(World, "distribution", picky)
    choices = Choices()
    world = World(3, 0, choices)
    for tokens in ([0, 2, 1], [2, 0], [0, 1, 2]):
        for _ in choices.runs():
            tree = DraftTree.chain(tokens, [0.5] * len(tokens))
            judged(verify.rule(name)(), tree, world)


def test_traversal_walks_as_deep_as_guesses_go(monkeypatch: pytest.MonkeyPatch) -> None:
    def sure(self: World, who: str, path: Sequence[int]) -> Tensor:
        return torch.tensor([1.0, 0.0], dtype=torch.float64)

    monkeypatch.setattr(World, "distribution", sure)
    choices = Choices()
    tree = DraftTree.chain([0] * 2000, [0.5] * 2000)
    for _ in choices.runs():
        step = judged(verify.rule("traversal")(), tree, World(2, 0, choices))
    assert len(step.emitted) == 2001


def test_block_judges_no_more_than_a_chain(monkeypatch: pytest.MonkeyPatch) -> None:
    """What hangs from elsewhere is left alone, by its place."""
    for tree in (chosen([0, 2, 1], [-1, -1, 1]), chosen([0, 2, 1, 1], [-1, 0, 0, 1]), drawn(2, 2)):
        assert (
            max(error(*emitted(verify.rule("block")(), tree, 3, seed, monkeypatch)) for seed in SEEDS)
            <= 1e-12
        )


# ---- what must be caught


def test_typical_acceptance_is_not_lossless(monkeypatch: pytest.MonkeyPatch) -> None:
    rule = verify.rule("typical")
    assert not rule.lossless
    assert error(*emitted(rule(), drawn(2, 2), 3, 0, monkeypatch)) > 1e-3


@pytest.mark.parametrize("module", [rejection, traversal])
def test_a_wrong_residual_is_caught(module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a rejection the token comes from p itself."""
    monkeypatch.setattr(
        module, "surplus", lambda p, q, scale=1.0: (p, float((scale * p - q).clamp_min(0).sum()))
    )
    rule = verify.rule(module.__name__.rpartition(".")[2])()
    assert error(*emitted(rule, drawn(2, 2), 3, 0, monkeypatch)) > 1e-3


def test_draws_without_replacement_judged_as_independent_ones_are_caught(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def draft(world: World) -> DraftTree:
        return drawn(2, 2)(world)._replace(repeats=True)

    assert (
        max(error(*emitted(verify.rule("rejection")(), draft, 3, seed, monkeypatch)) for seed in SEEDS) > 1e-3
    )


def test_dropping_a_draw_because_of_its_token_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    def draft(world: World) -> DraftTree:
        tree = drawn(1, 2)(world)
        keep = [i for i, token in enumerate(tree.tokens) if token != 0]
        return tree._replace(
            tokens=[tree.tokens[i] for i in keep],
            parents=[ROOT] * len(keep),
            confidence=[0.5] * len(keep),
            probs_of=[0] * len(keep),
        )

    assert error(*emitted(verify.rule("rejection")(), draft, 3, 0, monkeypatch)) > 1e-3


def test_ordering_draws_by_their_tokens_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    def draft(world: World) -> DraftTree:
        """The likelier of two draws goes first: it was not drawn from the law that it is judged by."""
        tree, distribution = drawn(1, 2)(world), world.distribution("p", ())
        return tree._replace(tokens=sorted(tree.tokens, key=lambda token: -float(distribution[token])))

    assert error(*emitted(verify.rule("rejection")(), draft, 3, 0, monkeypatch)) > 1e-3
