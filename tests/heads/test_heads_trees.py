"""Trees of heads: well-formed, within their budget, and the likeliest possible."""

from __future__ import annotations

import itertools
import math
from array import array
from collections.abc import Sequence
from types import SimpleNamespace

import pytest
import torch
from helpers import answer, token_prompts
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from outrider import LLM, SamplingParams, draft
from outrider.backends.select import backend_for
from outrider.config import SpeculativeOptions
from outrider.core.row import Row
from outrider.core.step import Batch
from outrider.core.step_input import StepInput
from outrider.core.tree import ROOT, Budget, Draft, DraftTree
from outrider.draft.layerskip import LayerSkip
from outrider.draft.union import Union
from outrider.drafting.base import Drafter, Target
from outrider.heads.base import HeadDrafter
from outrider.heads.choose import Chooser
from outrider.heads.ranks import EAGLE, MEDUSA, RankAccuracy, paths
from outrider.heads.trees import DynamicTree, LevelTree, RankTree, SampledTree
from outrider.sampling.sampler import Sampler
from outrider.testing import check_idle, check_tree, make_row, random_prompts, tiny_checkpoint, visible_parts

V = 7
TABLE = array("i", range(1000, 1400))  # slots are no positions
BASE = 30


def logits_of(seed: int, path: Sequence[int]) -> Tensor:
    """Logits that depend on the path alone."""
    return torch.randn(V, generator=torch.Generator().manual_seed(hash((seed, *path)) & 0xFFFFFFF)) * 2


def chooser() -> Chooser:
    kernels = backend_for(torch.device("cpu"), torch.float32)
    return Chooser(
        SimpleNamespace(vocabulary=V, decoder=SimpleNamespace(backend=kernels), sampler=Sampler(kernels))
    )  # type: ignore[arg-type]


CHOOSE = chooser()


def grow(tree: LevelTree, seed: int, nodes: int) -> DraftTree:
    """Grow as a drafter does: every row is in a draft slot one position below its parent, used once."""
    at: list[tuple[int, ...]] = [()]  # token paths of the rows of the last forward
    used: set[int] = set()
    for level in itertools.count():
        tree.add_level(CHOOSE, torch.stack([logits_of(seed, path) for path in at]))
        if not tree.sources:
            return tree.draft_tree
        step_input, before = StepInput(), at
        tree.add_to(step_input)
        step_input.build()
        paths_of_rows = tree.frontier_paths
        assert step_input.length == len(tree.sources) == len(paths_of_rows)
        at = [tuple(output) for output, _ in paths_of_rows]
        assert step_input.input_ids == [path[-1] for path in at]
        assert step_input.positions == [BASE + level] * len(at)
        assert [path[:-1] for path in at] == [before[source] for source in tree.sources]
        assert step_input.slot_mapping == [slots[-1] for _, slots in paths_of_rows]
        fresh = set(step_input.slot_mapping)
        assert len(fresh) == len(at) and not fresh & used
        used |= fresh
        assert used <= set(TABLE[BASE : BASE + nodes])
    raise AssertionError


def row_at(temperature: float) -> Row:
    row = make_row(list(range(BASE + 1)))
    row.params = SamplingParams(temperature=temperature, seed=3, max_tokens=50)
    row.distribution = row.params.distribution
    return row


def node_paths(tree: DraftTree) -> list[tuple[int, ...]]:
    found: list[tuple[int, ...]] = []
    for token, parent in zip(tree.tokens, tree.parents):
        found.append((*(found[parent] if parent != ROOT else ()), token))
    return found


BUDGETS = st.integers(1, 4).flatmap(lambda depth: st.tuples(st.just(depth), st.integers(depth, 14)))


@settings(max_examples=80, deadline=None)
@given(budget=BUDGETS, k=st.integers(1, 5), seed=st.integers(0, 999), temperature=st.sampled_from([0.0, 0.9]))
def test_dynamic_trees_are_proper(budget: tuple[int, int], k: int, seed: int, temperature: float) -> None:
    row = row_at(temperature)
    tree = grow(DynamicTree(row, TABLE, BASE, Budget(*budget), k), seed, budget[1])
    check_tree(tree, Budget(*budget))
    assert tree.tokens


def joint(seed: int, path: Sequence[int]) -> float:
    return math.prod(float(logits_of(seed, path[:i]).double().softmax(-1)[path[i]]) for i in range(len(path)))


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 9999), nodes=st.integers(2, 6), depth=st.integers(1, 3))
def test_a_dynamic_tree_has_the_likeliest_nodes(seed: int, nodes: int, depth: int) -> None:
    """Without a cut of levels, against every set of nodes that is closed under parents."""
    k, row = 2, row_at(0.0)
    growing = DynamicTree(row, TABLE, BASE, Budget(depth, max(nodes, depth)), k)
    growing.width = k**depth  # no node is cut
    at: list[tuple[int, ...]] = [()]
    while growing.sources:
        growing.add_level(CHOOSE, torch.stack([logits_of(seed, path) for path in at]))
        at = [tuple(path) for path, _ in growing.frontier_paths]
    tree = growing.draft_tree
    candidates: list[tuple[int, ...]] = []
    layer: list[tuple[int, ...]] = [()]
    for _ in range(depth):
        layer = [(*path, int(token)) for path in layer for token in logits_of(seed, path).topk(k).indices]
        candidates += layer
    count = min(max(nodes, depth), len(candidates))
    worth = {path: joint(seed, path) for path in candidates}
    best = max(
        sum(worth[path] for path in chosen)
        for chosen in itertools.combinations(candidates, count)
        if all(path[:-1] in chosen or len(path) == 1 for path in chosen)
    )
    assert len(tree.tokens) == count
    assert sum(worth[path] for path in node_paths(tree)) == pytest.approx(best, rel=1e-6)
    for path, confidence in zip(node_paths(tree), tree.confidence):
        assert confidence == pytest.approx(
            float(logits_of(seed, path[:-1]).double().softmax(-1)[path[-1]]), rel=1e-4
        )


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 999),
    nodes=st.integers(1, 30),
    depth=st.integers(1, 5),
    name=st.sampled_from([*EAGLE, *MEDUSA]),
)
def test_static_trees_are_proper(seed: int, nodes: int, depth: int, name: str) -> None:
    """No node outside the published tree; at full budget all of it that the vocabulary allows."""
    published = set(paths({**EAGLE, **MEDUSA}[name]))
    budget = Budget(min(depth, nodes), nodes)
    shape = RankAccuracy.prior(budget.depth, 10).best_paths(budget.nodes, budget.depth, published)
    growing = RankTree(row_at(0.0), shape, BASE, TABLE)
    tree = grow(growing, seed, nodes)
    check_tree(tree, budget)
    ranks = {
        tuple(
            logits_of(seed, path[:i]).argsort(descending=True).tolist().index(path[i])
            for i in range(len(path))
        )
        for path in node_paths(tree)
    }
    assert ranks <= published
    fits = {path for path in published if len(path) <= budget.depth and max(path) < V}
    assert len(tree.tokens) == min(nodes, len(fits)) or any(max(path) >= V for path in published)


@settings(max_examples=60, deadline=None)
@given(budget=BUDGETS, k=st.integers(1, 4), seed=st.integers(0, 999))
def test_sampled_trees_carry_their_distributions(budget: tuple[int, int], k: int, seed: int) -> None:
    row = row_at(0.9)
    tree = grow(SampledTree(row, TABLE, BASE, Budget(*budget), k, 0), seed, budget[1])
    check_tree(tree, Budget(*budget))
    for i, path in enumerate(node_paths(tree)):
        distribution = tree.distribution(i)
        assert distribution is not None and torch.equal(
            distribution, CHOOSE.distribution(row, path[:-1], logits_of(seed, path[:-1]))
        )
        assert distribution[path[-1]] > 0


def test_a_larger_budget_is_at_least_as_likely() -> None:
    """A larger budget of the same depth finds a tree that is at least as likely."""
    for seed in range(20):
        sums = []
        for nodes in range(3, 15):
            tree = grow(DynamicTree(row_at(0.0), TABLE, BASE, Budget(3, nodes), 5), seed, nodes)
            sums.append(sum(joint(seed, path) for path in node_paths(tree)))
        assert sums == sorted(sums)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[LLM, LLM]:
    folder = tiny_checkpoint(tmp_path_factory.mktemp("three"), num_hidden_layers=3)
    return LLM(folder, dtype="float32"), LLM(folder, dtype="float32")


@pytest.mark.parametrize(
    "head", [name for name, method in draft.methods().items() if issubclass(method, HeadDrafter)]
)
def test_union_of_an_early_exit_and_a_head(pair: tuple[LLM, LLM], head: str) -> None:
    """The target's first layers, whose states verification resumes from, beside a head that reads states."""
    plain, fast = pair

    def early(target: Target) -> Drafter:
        drafter = LayerSkip(LayerSkip.Options(early_exit=2, exit_threshold=None), target)
        drafter.depth = 3
        return drafter

    union = Union(Union.Options(), fast.engine.target, [early, draft.method(head).example])
    fast.engine.use(union, SpeculativeOptions.of({"method": "off", "num_speculative_tokens": union.depth}))
    drafted, propose = [0, 0], union.propose

    def counting(batch: Batch) -> Draft:
        out = propose(batch)
        for trees, _ in union.proposed.values():
            for i, tree in enumerate(trees):
                drafted[i] += len(tree.tokens)
        return out

    union.propose = counting  # type: ignore[method-assign]
    params = [
        SamplingParams(temperature=0.8 * (i % 2), seed=i, max_tokens=24, ignore_eos=True) for i in range(4)
    ]
    prompts = random_prompts(4, seed=12)
    outputs = fast.generate(token_prompts(prompts), params, use_tqdm=False)
    assert [visible_parts(o.outputs) for o in outputs] == [
        visible_parts(answer(plain, ids, p).outputs) for ids, p in zip(prompts, params)
    ]
    assert drafted[0] > 0 and drafted[1] > 0 and sum(o.speculation.accepted for o in outputs) > 0
    check_idle(fast)
