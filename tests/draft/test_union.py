"""Several drafters as one: the merged tree holds the likeliest nodes of all, each drafter learns as if it
were alone, and what was drawn stays a draw.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from outrider import LLM, ConfigError, SamplingParams
from outrider.core.row import Row
from outrider.core.step import Batch, Commit, Needs
from outrider.core.tree import EMPTY_TREE, ROOT, Budget, Draft, DraftTree
from outrider.draft.draft_model import DraftModel
from outrider.draft.first import First
from outrider.draft.ngram import Ngram
from outrider.draft.suffix import Suffix
from outrider.draft.union import Union
from outrider.draft.union.merge import Merger, independent, merge
from outrider.drafting.base import Drafter, Storage, Target
from outrider.sampling import random_streams
from outrider.testing import (
    FakeTarget,
    accepted_path,
    check_idle,
    check_tree,
    drafted_batch,
    make_drafter,
    make_row,
    propose_tree,
    proposed_tree,
)
from outrider.verify.base import Rule
from outrider.verify.rejection import Rejection
from outrider.verify.traversal import Traversal

Paths = dict[tuple[int, ...], float]


class Fixed(Drafter):
    """Proposes one tree, and records what it is given."""

    def __init__(self, tree: DraftTree, topk: int = 0, depth: int = 3) -> None:
        self.tree, self.needs, self.depth = tree, Needs(topk), depth
        self.budgets: list[Budget] = []
        self.seen: list[Commit] = []
        self.gone: list[tuple[Row, str]] = []
        self.slot_bytes, self.memory = 10 * topk, topk

    def size(self, depth: int) -> int:
        return 2 * depth

    def footprint(self, device: torch.device) -> Counter[torch.device]:
        return Counter({device: self.slot_bytes})

    def allocate(self, slots: int, pool: Any) -> Storage:
        return Storage([(slots, pool)] * (self.slot_bytes > 0))  # type: ignore[list-item]

    def propose(self, batch: Batch) -> Draft:
        self.budgets = [step.budget for step in batch]
        return Draft([self.tree if step.budget.nodes else EMPTY_TREE for step in batch])

    def observe(self, commit: Commit) -> None:
        self.seen.append(commit)

    def forget(self, row: Row, reason: str) -> None:
        self.gone.append((row, reason))

    def filled(self, row: Row) -> int:
        return self.slot_bytes


def factory(drafter: Drafter) -> Callable[[Target], Drafter]:
    """Returns the drafter, with the target that it is given."""

    def make(target: Target) -> Drafter:
        drafter.target = target
        return drafter

    return make


def together(method: type[Union], *drafters: Drafter, target: Any = None, nodes: int | None = None) -> Union:
    factories = [factory(drafter) for drafter in drafters]
    return method(method.Options(nodes=nodes), target or FakeTarget(), factories)


def paths_of(tree: DraftTree) -> Paths:
    """Path of tokens -> confidence of its last."""
    paths: dict[int, tuple[int, ...]] = {ROOT: ()}
    for i, (token, parent) in enumerate(zip(tree.tokens, tree.parents)):
        paths[i] = (*paths[parent], token)
    return {paths[i]: tree.confidence[i] for i in range(len(tree.tokens))}


def tree_of(paths: Paths) -> DraftTree:
    tree, place = DraftTree([], [], []), {(): ROOT}
    for path in sorted(paths, key=len):
        place[path] = len(tree.tokens)
        tree.tokens.append(path[-1])
        tree.parents.append(place[path[:-1]])
        tree.confidence.append(paths[path])
    return tree


@st.composite
def trees(draw: st.DrawFn) -> DraftTree:
    words = draw(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=4), max_size=5))
    chance = st.sampled_from([0.1, 0.2, 0.4, 0.7, 0.9])
    return tree_of({tuple(word[:n]): draw(chance) for word in words for n in range(1, len(word) + 1)})


# ---- merging


def merged(trees: Sequence[DraftTree], nodes: int) -> DraftTree:
    return merge(trees, nodes).tree


@given(st.lists(trees(), min_size=1, max_size=3), st.integers(1, 12))
def test_the_merged_tree_holds_the_likeliest_nodes_of_all(several: list[DraftTree], nodes: int) -> None:
    tree = merged(several, nodes)
    check_tree(tree, Budget(4, nodes))
    every: Paths = {}
    for one in several:
        for path, confidence in paths_of(one).items():
            every[path] = max(confidence, every.get(path, 0))
    found = paths_of(tree)
    assert all(every[path] == confidence for path, confidence in found.items())
    joint: Paths = {(): 1.0}
    for path in sorted(every, key=len):
        joint[path] = joint[path[:-1]] * every[path]
    best = sorted(list(joint.values())[1:], reverse=True)[:nodes]
    assert sorted((joint[path] for path in found), reverse=True) == pytest.approx(best)


@given(
    st.lists(trees(), min_size=1, max_size=3),
    st.integers(1, 12),
    st.lists(st.integers(0, 2), min_size=1, max_size=5),
    st.data(),
)
def test_each_drafter_sees_its_own_part(
    several: list[DraftTree], nodes: int, text: list[int], data: st.DataObject
) -> None:
    """What was verified of its nodes, its part of the path, and the best ids at its nodes; the controller
    cuts, too.
    """
    drafters = [Fixed(tree, topk=k) for k, tree in enumerate(several)]
    union = together(Union, *drafters)
    batch = drafted_batch(union, make_row([5]), Budget(4, nodes))
    step = batch[0]
    before = step.tree
    cut = data.draw(st.sets(st.sampled_from(range(len(before.tokens))))) if before.tokens else set()
    kept = [i for i in range(len(before.tokens)) if not cut & set(ancestors(before, i))]
    whole = before.only(kept) if cut else before
    step.tree, step.kept, step.accepted = whole, kept if cut else None, accepted_path(whole, text)
    step.emitted = text[: len(step.accepted) + 1]
    names = [(), *paths_of(whole)]
    best = step.topk = [[hash(name) % 97, 1, 2, 3] for name in names]
    union.observe(Commit(batch))
    for k, (drafter, tree) in enumerate(zip(drafters, several)):
        mine = drafter.seen[-1].batch[0]
        kept = mine.tree
        assert paths_of(kept) == {name: c for name, c in paths_of(tree).items() if name in names}
        assert mine.accepted == accepted_path(kept, text)
        assert mine.topk == ([best[names.index(name)][:k] for name in [(), *paths_of(kept)]] if k else [])
        assert (mine.predicted, mine.emitted) == (step.predicted, step.emitted)


def ancestors(tree: DraftTree, node: int) -> list[int]:
    return [] if node == ROOT else [*ancestors(tree, tree.parents[node]), node]


def test_probes_come_last_whole_or_not_at_all() -> None:
    """Two windows of two, and three draft tokens; each drafter gets back its own nodes."""
    one = DraftTree([1, 8, 9], [-1, -1, 1], [0.9, 0.0, 0.0], probes=2)
    two = DraftTree([1, 2, 7, 6], [-1, 0, 0, 2], [0.9, 0.8, 0.0, 0.0], probes=2)
    tree = merged([one, two], 6)
    assert (tree.tokens, tree.parents, tree.probes) == ([1, 2, 8, 9, 7, 6], [-1, 0, -1, 2, 0, 4], 4)
    assert (merged([one, two], 5).tokens, merged([one, two], 5).probes) == ([1, 2, 8, 9], 2)
    assert (merged([one, two], 3).tokens, merged([one, two], 3).probes) == ([1, 2], 0)
    union = together(Union, mine := Fixed(one, 1), other := Fixed(two, 1))
    best = [[i] for i in range(7)]
    for nodes, expected in ((6, [[0], [1], [2], [5], [6]]), (5, [[0], [1], [2]])):
        batch = drafted_batch(union, make_row([5]), Budget(3, nodes))
        batch[0].accepted, batch[0].emitted, batch[0].topk = [0, 1], [1, 2, 3], best[: 1 + nodes]
        union.observe(Commit(batch))
        first, second = mine.seen[-1].batch[0], other.seen[-1].batch[0]
        assert first.topk == [[0], [1], [3], [4]] and first.accepted == [0]
        assert second.topk == expected and second.accepted == [0, 1]
        assert second.tree.probes == (2 if nodes == 6 else 0)


@pytest.mark.parametrize("nested", [False, True])
def test_siblings_with_one_token_stay_separate(nested: bool) -> None:
    """Two independent samples of one token: a cut that keeps the second keeps its subtree."""
    distribution = torch.ones(9, dtype=torch.float64) / 9
    tree = DraftTree(
        [3, 3, 4, 4],
        [-1, -1, 0, 1],
        [0.5] * 4,
        [distribution, distribution, distribution],
        [0, 0, 1, 2],
        repeats=True,
    )
    mine, silent = Fixed(tree), Fixed(EMPTY_TREE)
    union = together(Union, together(Union, mine) if nested else mine, silent)
    batch = drafted_batch(union, make_row([5]), Budget(4, 9))
    step = batch[0]
    assert step.tree._replace(source=(), proposers=()) == tree
    step.tree, step.kept, step.accepted, step.emitted = tree.only([1, 3]), [1, 3], [0, 1], [3, 4, 6]
    union.observe(Commit(batch))
    seen = mine.seen[-1].batch[0]
    assert seen.tree == tree.only([1, 3]) and seen.accepted == [0, 1]
    assert seen.kept == [1, 3] and silent.seen[-1].batch[0].accepted == []


# ---- as a drafter


def test_all_are_asked_within_their_own_levels() -> None:
    chain, wide = DraftTree.chain([1, 2, 3], [0.9, 0.8, 0.7]), DraftTree([1, 4], [-1, -1], [0.5, 0.6])
    one, two = Fixed(chain), Fixed(wide, topk=4, depth=1)
    union = together(Union, one, two)
    assert (union.depth, union.size(3), union.size(1), union.needs.topk) == (3, 8, 4, 4)
    assert union.footprint(torch.device("cpu")) == {torch.device("cpu"): 40}
    assert union.allocate(7, "pool") == Storage([(7, "pool")], [])  # type: ignore[arg-type, list-item]
    tree = propose_tree(union, make_row([9]), 3)
    assert (tree.tokens, tree.parents) == ([1, 2, 4, 3], [-1, 0, -1, 1])
    assert (one.budgets, two.budgets) == ([Budget(3, 6)], [Budget(1, 2)])
    row = make_row([9])
    union.forget(row, "finished")
    assert one.gone == two.gone == [(row, "finished")]
    assert union.filled(row) == 0
    assert union.memory == [0, 4]
    union.memory = [5, 6]
    assert (one.memory, two.memory) == (5, 6)
    nested = Union(
        Union.Options(),
        FakeTarget(needs_probs=True),
        [lambda target: together(Union, one, two, target=target), factory(Fixed(EMPTY_TREE))],
    )
    targets = [one.target, two.target, *(drafter.target for drafter in nested.drafters)]
    assert all(target.needs_probs for target in targets)
    assert len({target.stream_id for target in targets}) == 4, "every drafter has random streams of its own"


def test_nodes_are_capped() -> None:
    one, two = (
        Fixed(DraftTree.chain([1, 2, 3], [0.9, 0.8, 0.7])),
        Fixed(DraftTree([1, 4], [-1, -1], [0.5, 0.95])),
    )
    union = together(Union, one, two, nodes=2)
    assert union.size(3) == 2
    assert propose_tree(union, make_row([9]), 3).tokens == [4, 1]


def test_the_first_drafter_with_a_proposal_is_used() -> None:
    silent, sure, spare = (
        Fixed(EMPTY_TREE),
        Fixed(DraftTree.chain([1, 2], [0.5, 0.5])),
        Fixed(DraftTree.chain([3], [0.9])),
    )
    first = together(First, silent, sure, spare)
    assert first.size(3) == 6
    assert propose_tree(first, make_row([9]), 3).tokens == [1, 2]
    assert spare.budgets == [Budget()], "asked all the same: it may have to keep up"
    batch = drafted_batch(first, make_row([9]), Budget(3, 6))
    batch[0].accepted, batch[0].emitted = [0], [1, 5]
    first.observe(Commit(batch))
    steps = [drafter.seen[-1].batch[0] for drafter in (silent, sure, spare)]
    assert [step.accepted for step in steps] == [[], [0], []]
    assert [len(step.tree.tokens) for step in steps] == [0, 2, 0]
    assert propose_tree(first, make_row([9]), 0).tokens == []


def test_first_asks_further_drafters_beside_probes() -> None:
    """The next one is asked as well, for the nodes that are left, and the window rides along."""
    window, sure = (
        Fixed(DraftTree([8, 9], [-1, 0], [0.0, 0.0], probes=2), topk=1),
        Fixed(DraftTree.chain([1, 2], [0.5, 0.5])),
    )
    first = together(First, window, sure)
    tree = proposed_tree(first, make_row([9]), Budget(3, 6))
    assert (tree.tokens, tree.parents, tree.probes) == ([1, 2, 8, 9], [-1, 0, -1, 2], 2)
    assert sure.budgets == [Budget(3, 4)]


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
        row = make_row([5])
        row.seed = seed
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
LIMIT = 44.3  # 15 degrees of freedom: once in 10,000


@pytest.mark.parametrize("method", [Union, First])
@pytest.mark.parametrize("rule", [Rejection(), Traversal()], ids=["rejection", "traversal"])
@pytest.mark.parametrize("repeats", [(False, False), (True, False)], ids=["without", "mixed"])
def test_mix_of_sampled_and_chosen_nodes_keeps_the_targets_distribution(
    method: type[Union], rule: Rule, repeats: tuple[bool, bool]
) -> None:
    """Two drafters that draw and one that chooses, with more nodes than fit."""
    members = [Drawing(1, 2, repeats[0]), Fixed(CHOSEN), Drawing(2, 2, repeats[1])]
    union = together(method, *(members if method is Union else reversed(members)))
    assert chi_square(union, rule, 1500, 7) < LIMIT


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
    assert chi_square(union, Rejection(), 1500, 2) > LIMIT


def every(node: Any) -> list[Any]:
    return [below for child in node.children for below in (child, *every(child))]


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
            a.tokens[:1] == b.tokens[:1]
            for a, b in zip(*(d.trees for d in drafter.drafts))
            if a.tokens and b.tokens
        )
        return draft

    drafter.propose = listening
    llm.generate(
        {"prompt_token_ids": [5, 6, 7]},
        SamplingParams(temperature=1.5, seed=1, max_tokens=60, ignore_eos=True),
    )
    assert len(same) > 8 and sum(same) < len(same) / 2


def test_caches_of_all_are_looked_after() -> None:
    """A draft in another vocabulary has pages of its own, wherever it stands."""
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
    apart = independent(tree)
    assert apart.repeats and independent(apart) is apart
    left = probs_of((), 1)
    for node, token in enumerate(tree.tokens):
        assert torch.allclose(apart.distribution(node), left)  # type: ignore[arg-type]
        left = random_streams.without(left, token)


def test_parents_with_one_distribution_sample_independently() -> None:
    """Independent heads have one q for a whole level; both children hold the same token."""
    first, second = torch.tensor([0.5, 0.3, 0.2]).double(), torch.tensor([0.6, 0.3, 0.1]).double()
    tree = DraftTree([0, 1, 0, 0], [ROOT, ROOT, 0, 1], [0.5] * 4, [first, second], [0, 0, 1, 1])
    apart = independent(tree)
    assert torch.equal(apart.distribution(2), second) and torch.equal(apart.distribution(3), second)
    assert torch.equal(apart.distribution(1), random_streams.without(first, 0))  # type: ignore[arg-type]


# ---- its options


LOOK_UPS: list[dict[str, Any]] = [
    {"method": "ngram", "prompt_lookup_min": 3},
    {"method": "suffix", "num_speculative_tokens": 2},
]


def test_drafters_are_described_as_alone() -> None:
    union = make_drafter(Union, drafters=LOOK_UPS)
    assert [type(drafter) for drafter in union.drafters] == [Ngram, Suffix]
    assert union.drafters[0].options.prompt_lookup_min == 3
    assert union.depths == [5, 2] and union.depth == 5
    nested = make_drafter(First, drafters=[{"method": "union", "drafters": LOOK_UPS}, {"method": "recycle"}])
    assert nested.needs.topk == 8 and nested.depth == 6


@pytest.mark.parametrize("method", ["union", "first"])
def test_a_draft_model_needs_no_method(method: str, tiny: Path) -> None:
    """Neither one in a folder nor the target itself."""
    drafters = [{"model": str(tiny)}, {"model": "self", "draft_kv_budget": 16}]
    llm = LLM(str(tiny), speculative_config={"method": method, "drafters": drafters})
    made: Any = llm.engine.drafter
    assert [type(drafter) for drafter in made.drafters] == [DraftModel, DraftModel]
    assert made.drafters[1].decoder is llm.engine.decoder is not made.drafters[0].decoder


@pytest.mark.parametrize(
    ("drafters", "message"),
    [
        ("ngram", "drafters must be a list"),
        ({"method": "ngram"}, "drafters must be a list"),
        (["ngram"], "must be a dict with a 'method' or a draft 'model', got 'ngram'"),
        ([{"num_speculative_tokens": 2}], "must be a dict with a 'method' or a draft 'model'"),
        ([{"model": 3}], "model must be a folder or a hub id, got 3"),
        ([{"method": "ngrams"}], "Did you mean 'ngram'"),
        ([{"method": "ngram", "prompt_lookup_mx": 3}], "Did you mean 'prompt_lookup_max'"),
        (
            [{"method": "ngram", "verification": "match"}],
            "unknown key 'verification' in 'drafters', method 'ngram'",
        ),
        (
            [{"method": "ngram", "num_speculative_tokens": 0}],
            "num_speculative_tokens must be a whole number of at least 1 or None, got 0",
        ),
        ([{"method": "ngram", "prompt_lookup_min": 0}], "prompt_lookup_min"),
        ([{"method": "recycle", "nodes": 0}], "nodes"),
        ([{"method": "union", "drafters": [{"method": "no"}]}], "unknown speculative method 'no'"),
    ],
)
@pytest.mark.parametrize("method", [Union, First])
def test_bad_drafters_are_named(method: type[Union], drafters: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        method.Options(drafters=drafters)


@pytest.mark.parametrize("nodes", [0, True, 2.5])
def test_bad_caps_are_named(nodes: Any) -> None:
    with pytest.raises(ConfigError, match="nodes must be a whole number"):
        Union.Options(nodes=nodes)


def test_there_must_be_drafters() -> None:
    with pytest.raises(ConfigError, match="needs 'drafters'"):
        make_drafter(Union)


MEMBERS: list[dict[str, Any]] = [
    {"method": "ngram", "prompt_lookup_min": 3, "prompt_lookup_max": 3},
    {"method": "lookahead", "window_size": 3},
    {"method": "draft_model", "siblings": 2, "num_speculative_tokens": 2},
    {"method": "recycle", "nodes": 20, "min_token_prob": 0.0},
    {"method": "draft_model", "num_speculative_tokens": 3},
]


@pytest.mark.parametrize("method", ["union", "first"])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_the_text_is_that_of_plain_decoding(
    method: str, temperature: float, tiny: Path, checkpoint: Any
) -> None:
    """With two models, a table and a window that want logits, and a look-up; some of it is accepted, and all
    ends with the rows.
    """
    models = iter([str(checkpoint(num_hidden_layers=1)), str(tiny)])
    members = [
        {**member, "model": next(models)} if member["method"] == "draft_model" else member
        for member in MEMBERS
    ]
    if method == "first":
        members = members[::2]
    prompts: Any = [{"prompt_token_ids": [i, 1, 2, 3, 1, 2]} for i in range(5)]
    params = SamplingParams(temperature=temperature, seed=3, max_tokens=40, ignore_eos=True)
    plain = LLM(str(tiny)).generate(prompts, params)
    llm = LLM(str(tiny), speculative_config={"method": method, "drafters": members}, max_num_seqs=3)
    drafter: Any = llm.engine.drafter
    models_in = [one for one in drafter.drafters if hasattr(one, "decoder")]
    assert llm.engine.cache.pools[1:] == [one.pool for one in models_in]
    device = llm.engine.device
    assert drafter.footprint(device) == sum((one.footprint(device) for one in models_in), Counter())
    assert drafter.footprint(device).total() > 0
    for _ in range(2):
        outputs = llm.generate(prompts, params)
        assert [output.outputs[0].token_ids for output in outputs] == [
            output.outputs[0].token_ids for output in plain
        ]
        if method == "union":
            assert sum(output.speculation.accepted for output in outputs) > 100, (
                "one of the models is the target"
            )
        llm.engine.forget_prefixes()
    check_idle(llm)
    for one in drafter.drafters:
        for name, value in vars(one).items():
            assert not (isinstance(value, dict) and any(isinstance(key, Row) for key in value)), (
                f"{type(one)} keeps {name}"
            )


def test_the_next_drafter_is_used_where_the_first_has_no_proposal(tiny: Path) -> None:
    """The last drafter is the target itself: rows without other drafts are drafted right."""
    members = [
        {"method": "ngram", "prompt_lookup_min": 6, "prompt_lookup_max": 6},
        {"method": "draft_model", "model": str(tiny)},
    ]
    llm = LLM(str(tiny), speculative_config={"method": "first", "drafters": members})
    outputs = llm.generate(
        [{"prompt_token_ids": [i, 1, 2]} for i in range(3)],
        SamplingParams(seed=3, max_tokens=40, ignore_eos=True),
    )
    assert sum(output.speculation.accepted for output in outputs) > 60


@pytest.mark.parametrize("rule", ["rejection", "traversal"])
def test_engine_verifies_a_mix_by_its_distributions(rule: str, tiny: Path, checkpoint: Any) -> None:
    """Two models that draw, of which one is the target: nearly all that it draws is accepted; and the same
    seed says the same.
    """
    members = [
        {"method": "draft_model", "model": str(model), "num_speculative_tokens": 3}
        for model in (tiny, checkpoint(seed=1))
    ]
    members.append({"method": "ngram"})
    llm = LLM(str(tiny), speculative_config={"method": "union", "drafters": members, "verification": rule})
    params = SamplingParams(seed=3, max_tokens=40, ignore_eos=True)
    outputs = [llm.generate([{"prompt_token_ids": [i, 1, 2]} for i in range(3)], params) for _ in range(2)]
    assert [o.outputs[0].token_ids for o in outputs[0]] == [o.outputs[0].token_ids for o in outputs[1]]
    assert sum(output.speculation.accepted for output in outputs[0]) > 60
    check_idle(llm)
