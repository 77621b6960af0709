"""A mix keeps the distribution of what its drafters sample."""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import cache
from typing import Any

import pytest
import torch
from covering import pairwise
from mixes import Fixed, every, together
from torch import Tensor

from outrider import LLM, SamplingParams
from outrider.core.row import Row
from outrider.core.step import Batch
from outrider.core.tree import ROOT, Budget, Draft, DraftTree
from outrider.draft.first import First
from outrider.draft.union import Union
from outrider.draft.union.merge import Merger, with_independent_samples
from outrider.drafting.base import Drafter
from outrider.sampling import random_streams
from outrider.testing import (
    FakeTarget,
    drafted_batch,
    make_row,
    proposed_tree,
)
from outrider.verify.base import Rule
from outrider.verify.rejection import Rejection
from outrider.verify.traversal import Traversal

# ---- sampled draft tokens

V = 4
Path_ = tuple[int, ...]


@cache
def probs_of(path: Path_, salt: int) -> Tensor:
    """Some distribution: float64 [V], some tokens much likelier than others."""
    rng = random.Random(f"{salt} {path}")
    mass = torch.tensor([rng.random() ** 3 + 0.02 for _ in range(V)], dtype=torch.float64)
    return mass / mass.sum()


class Drawing(Drafter):
    """Draws `siblings` children below each node of two levels, as a draft model does; the confidence is that
    of the token.
    """

    depth = 2

    def __init__(self, salt: int, siblings: int = 2, repeats: bool = False) -> None:
        self.salt, self.siblings, self.repeats = salt, siblings, repeats
        self.target = FakeTarget()

    def size(self, depth: int) -> int:
        return sum(self.siblings**level for level in range(1, depth + 1))

    def propose(self, batch: Batch) -> Draft:
        tokens, parents, confidence, distributions, belongs = [], [], [], [], []
        frontier: list[tuple[int, Path_]] = [(ROOT, ())]
        for _ in range(batch[0].budget.depth):
            below = []
            for parent, path in frontier:
                distributions.append(probs_of(path, self.salt))
                first = self.target.stream_id + len(tokens)
                for token in random_streams.children(
                    batch[0].row, distributions[-1], range(first, first + self.siblings), self.repeats
                ):
                    below.append((len(tokens), (*path, token)))
                    tokens.append(token)
                    parents.append(parent)
                    confidence.append(float(distributions[-1][token]))
                    belongs.append(len(distributions) - 1)
            frontier = below
        return Draft([DraftTree(tokens, parents, confidence, distributions, belongs, self.repeats)])


class EnumeratedTarget:
    """A picker with enumerated distributions and the real random streams."""

    def __init__(self, row: Row) -> None:
        self.row = row

    def p(self, row: int, node: int, path: Sequence[int]) -> Tensor:
        return probs_of(tuple(path), 0)

    def accept(self, row: int, node: int, probability: float) -> bool:
        return random_streams.accept(self.row, node, probability)

    def draw(self, row: int, node: int, distribution: Tensor) -> int:
        return random_streams.emit(self.row, node, distribution)


def chi_square(union: Union, rule: Rule, runs: int, nodes: int) -> float:
    """Counts of the first two tokens, 15 degrees of freedom; a missing second counts by its probability."""
    found = torch.zeros(V, V, dtype=torch.float64)
    for seed in range(runs):
        row = make_row([5], seed=seed)
        batch = drafted_batch(union, row, Budget(2, nodes))
        rule(batch, EnumeratedTarget(row))  # type: ignore[arg-type]
        answer_text = batch[0].emitted
        if len(answer_text) == 1:
            found[answer_text[0]] += probs_of((answer_text[0],), 0)
        else:
            found[answer_text[0], answer_text[1]] += 1
    expected = torch.stack([probs_of((), 0)[a] * probs_of((a,), 0) for a in range(V)]) * runs
    return float(((found - expected) ** 2 / expected).sum())


CHOSEN = DraftTree([0, 1, 2, 3], [-1, 0, -1, 2], [0.6, 0.5, 0.2, 0.5])
LIKELY = int(probs_of((), 1).argmax())  # of what the first drafter draws
RUNS = 1000
LIMIT = 44.3  # 15 degrees of freedom: once in 10,000


@pairwise(
    method=[Union, First],
    rule={"rejection": Rejection(), "traversal": Traversal()},
    repeats={"without": (False, False), "mixed": (True, False)},
)
def test_mix_of_sampled_and_chosen_nodes_keeps_the_targets_distribution(
    method: type[Union], rule: Rule, repeats: tuple[bool, bool]
) -> None:
    """Two drafters that draw and one that chooses, with more nodes than fit."""
    members = [Drawing(1, 2, repeats[0]), Fixed(CHOSEN), Drawing(2, 2, repeats[1])]
    union = together(method, *(members if method is Union else reversed(members)))
    assert chi_square(union, rule, RUNS, 7) < LIMIT


@pytest.mark.parametrize("broken", ["same stream", "confidence", "merged", "dropped"])
def test_distribution_test_detects_biased_rules(broken: str, monkeypatch: pytest.MonkeyPatch) -> None:
    members: list[Drafter] = [Fixed(DraftTree([LIKELY], [ROOT], [0.9])), Drawing(1)]
    if broken == "same stream":
        members = [Drawing(137, 1), Drawing(137, 1)]
    union = together(Union, *members)
    add = Merger.add
    if broken == "same stream":
        union.drafters[0].target = union.drafters[1].target

    def by_token(self: Any, tree: DraftTree) -> None:
        """A draw is as likely to stay as its own token is likely."""
        add(self, tree)
        for node in every(self.root):
            if node.distribution >= 0:
                node.confidence = float(self.distributions[node.distribution][node.token])

    def unique(self: Any, tree: DraftTree) -> None:
        """A draw is dropped where a sibling holds its token."""
        add(self, tree)
        for node in [self.root, *every(self.root)]:
            node.children = list({child.token: child for child in reversed(node.children)}.values())[::-1]

    def as_chosen(self: Any, tree: DraftTree) -> None:
        """Draws are merged with chosen nodes that hold the same token."""
        chosen = set(zip(tree.parents, tree.tokens)) & {(ROOT, LIKELY)}
        distribution = [
            -1 if pair in chosen else at for pair, at in zip(zip(tree.parents, tree.tokens), tree.probs_of)
        ]
        add(self, tree._replace(probs_of=distribution))

    changes = {"confidence": by_token, "dropped": unique, "merged": as_chosen}
    if broken in changes:
        monkeypatch.setattr(Merger, "add", changes[broken])
    assert chi_square(union, Rejection(), RUNS, 2) > LIMIT


@pytest.mark.parametrize(
    "kind", [{"method": "layerskip", "early_exit": 1}, {"method": "draft_model", "model": "MODEL"}]
)
def test_two_drafters_of_one_method_have_their_own_random_streams(kind: dict[str, Any], tiny: Any) -> None:
    """Otherwise the second would draw what the first has drawn, and a rule would judge it twice."""
    kind = {key: str(tiny) if value == "MODEL" else value for key, value in kind.items()}
    llm = LLM(
        str(tiny),
        speculative_config={"method": "union", "drafters": [kind, kind], "verification": "rejection"},
    )
    drafter: Any = llm.engine.drafter
    same, propose = [], drafter.propose

    def listening(*given: Any) -> Draft:
        draft: Draft = propose(*given)
        same.extend(
            a.tokens[:1] == b.tokens[:1] for (a, b), _ in drafter.proposed.values() if a.tokens and b.tokens
        )
        return draft

    drafter.propose = listening
    llm.generate(
        {"prompt_token_ids": [5, 6, 7]},
        SamplingParams(temperature=1.5, seed=1, max_tokens=60, ignore_eos=True),
    )
    assert len(same) > 8 and sum(same) < len(same) / 2


def test_caches_of_all_are_looked_after() -> None:
    """A draft in another vocabulary has pages of its own, at any place of the mix."""
    draft = {"method": "draft_model", "model": "builtin-draft", "vocab_mismatch": "retokenize"}
    config = {"method": "union", "drafters": [{"method": "ngram"}, draft]}
    llm = LLM("builtin", speculative_config=config, enable_prefix_caching=False, max_model_len=128)
    _, own = llm.engine.caches
    assert own.prefix_caching is False
    llm.generate("Once upon a time", SamplingParams(temperature=0, max_tokens=20))
    llm.engine.check()
    assert not own.tables


def test_separate_equal_distributions_give_the_same_samples() -> None:
    """The distribution of each sample given those before it."""
    tree = proposed_tree(Drawing(1, 3), make_row([5]), Budget(1, 3))
    apart = with_independent_samples(tree)
    assert apart.repeats and with_independent_samples(apart) is apart
    left = probs_of((), 1)
    for node, token in enumerate(tree.tokens):
        assert torch.allclose(apart.distribution(node), left)  # type: ignore[arg-type]
        left = random_streams.without(left, token)


def test_parents_with_one_distribution_sample_independently() -> None:
    """Independent heads have one q for a whole level; both children hold the same token."""
    first, second = torch.tensor([0.5, 0.3, 0.2]).double(), torch.tensor([0.6, 0.3, 0.1]).double()
    tree = DraftTree([0, 1, 0, 0], [ROOT, ROOT, 0, 1], [0.5] * 4, [first, second], [0, 0, 1, 1])
    apart = with_independent_samples(tree)
    assert torch.equal(apart.distribution(2), second) and torch.equal(apart.distribution(3), second)
    assert torch.equal(apart.distribution(1), random_streams.without(first, 0))  # type: ignore[arg-type]
