"""Several drafters as one: the merged tree holds the likeliest nodes of all, each drafter learns as if it
were alone, and what was drawn stays a draw.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from mixes import Fixed, factory, together

from outrider import LLM, SamplingParams
from outrider.core.row import Row
from outrider.core.step import Commit
from outrider.core.tree import EMPTY_TREE, ROOT, Budget, DraftTree
from outrider.draft.first import First
from outrider.draft.union import Union
from outrider.draft.union.merge import merge
from outrider.drafting.base import Storage
from outrider.testing import (
    FakeTarget,
    accepted_path,
    check_idle,
    check_tree,
    drafted_batch,
    make_row,
    propose_tree,
    proposed_tree,
)

Paths = dict[tuple[int, ...], float]


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
    best = [[hash(name) % 97, 1, 2, 3][: union.needs.topk] for name in names]
    step.topk = best if union.needs.topk else []
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
    assert seen.kept == [1, 3] and not silent.seen[-1].batch[0].accepted


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
