"""Trees that grow on the device are those that the host grows level by level, and are read once."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from syncs import Syncs
from torch import Tensor

from outrider import LLM, SamplingParams
from outrider.backends.select import backend_for
from outrider.backends.torch.backend import TorchBackend
from outrider.core.row import Row
from outrider.core.tree import NO_BUDGET, Budget, DraftTree
from outrider.heads.choose import Chooser
from outrider.heads.device_trees import grow_blocks, on_device
from outrider.heads.growth import DeviceGrowth, Front, GrowthPlan, LevelInput, grow
from outrider.heads.ranks import EAGLE, MEDUSA, paths, prior_paths
from outrider.heads.trees import BlockTree, DynamicTree, LevelTree, RankTree
from outrider.sampling.sampler import Sampler
from outrider.testing import (
    check_idle,
    check_tree,
    make_row,
    random_prompts,
    use_example,
    visible_parts,
)

V, BASE = 7, 30
TREES = st.lists(
    st.tuples(st.integers(1, 4), st.integers(0, 10), st.integers(1, 5), st.sampled_from([0.0, 0.9])),
    min_size=1,
    max_size=3,
)
IDS = torch.tensor([3, 0, 11, 5, 8, 2, 9], dtype=torch.int32)  # tokens of a head's own vocabulary


def logits_of(seed: int, path: Sequence[int]) -> Tensor:
    """Logits that depend on the path alone."""
    return torch.randn(V, generator=torch.Generator().manual_seed(hash((seed, *path)) & 0xFFFFFFF)) * 2


def chooser(ids: Tensor | None) -> Chooser:
    backend = TorchBackend(torch.device("cpu"), torch.float32)
    target: Any = SimpleNamespace(
        vocabulary=12 if ids is not None else V,
        decoder=SimpleNamespace(backend=backend),
        sampler=Sampler(backend),
    )
    return Chooser(target, ids)


def row_at(temperature: float, top_k: int = 0) -> Row:
    row = make_row(list(range(BASE + 1)))
    row.params = SamplingParams(temperature=temperature, top_k=top_k, seed=3, max_tokens=50)
    row.distribution = row.params.distribution
    return row


def tables(count: int) -> list[array[int]]:
    return [array("i", range(1000 * i, 1000 * i + 400)) for i in range(1, count + 1)]


def grown_by_host(tree: LevelTree, choose: Chooser, seed: int) -> DraftTree:
    at: list[tuple[int, ...]] = [()]
    while True:
        tree.add_level(choose, torch.stack([logits_of(seed, path) for path in at]))
        if not tree.sources:
            return tree.draft_tree
        at = [tuple(tokens) for tokens, _ in tree.frontier_paths]


def grow_on_device(
    growth: DeviceGrowth, choose: Chooser, seeds: Sequence[int], look: Callable[[Any, Any], None]
) -> None:
    """seeds: of each tree.  look: at the forward of a level, and the token paths of its rows."""

    def front(at: Sequence[Any]) -> Front[Sequence[Any]]:
        """The seed of the tree, and the tokens, of each row."""
        return Front(at, torch.stack([logits_of(*one) for one in at]))

    def advance(level: int, at: Sequence[Any], given: LevelInput) -> Front[Sequence[Any]]:
        step = growth.forwards[level - 1]
        step.put(given.ids, given.paths)
        before = [at[i] for i in given.sources.tolist()]
        below = [(seed, (*path, token)) for (seed, path), token in zip(before, given.ids.tolist())]
        look(step, below)
        return front(below)

    plan = GrowthPlan.of(growth, choose).on(torch.device("cpu"))
    growth.set_trees(grow(plan, choose, front([(seed, ()) for seed in seeds]), advance))


@settings(max_examples=60, deadline=None)
@given(sizes=TREES, seed=st.integers(0, 999), own=st.booleans(), top_k=st.sampled_from([0, 2]))
def test_dynamic_trees_are_those_of_the_host(
    sizes: list[tuple[int, int, int, float]], seed: int, own: bool, top_k: int
) -> None:
    """Rows of several depths, widths and temperatures, and filters that leave fewer tokens than ranks."""
    choose = chooser(IDS if own else None)

    def made() -> list[DynamicTree]:
        budgets = [Budget(depth, depth + more) for depth, more, _, _ in sizes]
        rest = zip(tables(len(sizes)), budgets, sizes)
        return [DynamicTree(row_at(t, top_k), table, BASE, budget, k) for table, budget, (_, _, k, t) in rest]

    expected = [grown_by_host(tree, choose, seed + i) for i, tree in enumerate(made())]
    trees, used = made(), set[int]()

    def look(step: Any, at: Any) -> None:
        assert step.positions == [BASE + len(at[0][1]) - 1] * len(at) and step.length == len(at)
        slots = [[slot] for slot in step.slot_mapping]  # of chains, whose nodes are rows of the table
        if step.device_paths is not None:
            slots = step.device_paths.tolist()
        assert [path[-1] for path in slots] == step.slot_mapping and not used & set(step.slot_mapping)
        used.update(step.slot_mapping)
        for (tree_seed, _), path in zip(at, slots):
            number = tree_seed - seed
            room = range(1000 * (number + 1) + BASE, 1000 * (number + 1) + BASE + trees[number].budget.nodes)
            assert set(path) <= set(room) and set(path) <= used

    growth = on_device(trees, choose)
    assert growth is not None
    grow_on_device(growth, choose, [seed + i for i in range(len(trees))], look)
    for tree, known in zip(trees, expected):
        check_tree(tree.draft_tree, tree.budget)
        assert tree.draft_tree[:2] == known[:2]
        assert tree.draft_tree.confidence == pytest.approx(known.confidence, rel=1e-6)


@settings(max_examples=40, deadline=None)
@given(sizes=TREES, seed=st.integers(0, 999), name=st.sampled_from([*EAGLE]), top_k=st.sampled_from([0, 2]))
def test_trees_of_ranks_are_those_of_the_host(
    sizes: list[tuple[int, int, int, float]], seed: int, name: str, top_k: int
) -> None:
    choose, allowed = chooser(None), frozenset(paths(EAGLE[name]))

    def made() -> list[RankTree]:
        shapes = [prior_paths(depth + more, depth, 10, allowed) for depth, more, _, _ in sizes]
        rest = zip(shapes, tables(len(sizes)), sizes)
        return [RankTree(row_at(t, top_k), shape, BASE, table) for shape, table, (*_, t) in rest]

    expected = [grown_by_host(tree, choose, seed + i) for i, tree in enumerate(made())]
    trees = made()
    growth = on_device(trees, choose)
    assert growth is not None
    grow_on_device(growth, choose, [seed + i for i in range(len(trees))], lambda step, at: None)
    for tree, known in zip(trees, expected):
        assert tree.draft_tree[:2] == known[:2]
        assert tree.draft_tree.confidence == pytest.approx(known.confidence, rel=1e-6)


@pytest.mark.parametrize("kind", ["chain", "dynamic", "ranks"])
def test_growth_reads_and_sends_nothing(kind: str) -> None:
    """So a device can record it: tensors of the meta device cannot be read, nor used beside host tensors."""
    choose, meta, budgets = chooser(None), torch.device("meta"), [Budget(3, 6), Budget(2, 4)]
    rest = [*zip(tables(2), budgets)]
    trees: list[Any] = [DynamicTree(row_at(0.0), t, BASE, b, 1 if kind == "chain" else 3) for t, b in rest]
    if kind == "ranks":
        allowed = frozenset(paths(next(iter(EAGLE.values()))))
        shapes = [prior_paths(budget.nodes, budget.depth, 10, allowed) for budget in budgets]
        trees = [RankTree(row_at(0.0), shape, BASE, t) for shape, (t, _) in zip(shapes, rest)]
    growth = on_device(trees, choose)
    assert growth is not None
    sizes = [len(level) for level in growth.requests]

    def top(logits: Tensor, inputs: Any, k: int) -> tuple[Tensor, Tensor]:
        return logits[:, :k].long(), logits[:, :k]

    def front(level: int) -> Front[None]:
        return Front(None, torch.empty(sizes[level], V, device=meta))

    def advance(level: int, state: None, given: LevelInput) -> Front[None]:
        growth.forwards[level - 1].put(given.ids, given.paths)
        assert len(given.ids) == len(given.sources) == sizes[level]
        return front(level)

    plan, fake = GrowthPlan.of(growth, choose).on(meta), SimpleNamespace(top=top)
    assert plan.row_counts == sizes[1:]
    assert grow(plan, fake, front(0), advance).is_meta  # type: ignore[arg-type]


@pytest.mark.parametrize("own", [False, True])
def test_many_rows_are_ranked_part_by_part(own: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """What ranking takes beside the logits does not grow with the number of rows."""
    choose, rows = chooser(IDS if own else None), [row_at(t) for t in (0.0, 0.9, 0.0, 0.7, 0.9)]
    given = rows, [0, 1, 2, 0, 1], torch.stack([logits_of(i, ()) for i in range(5)]), 3
    expected, sizes, top_next = choose.next_tokens(*given), list[int](), choose.backend.top_next

    class Noting(type(top_next)):  # type: ignore[misc]
        def __call__(self, logits: Tensor, *rest: Any) -> Any:
            sizes.append(len(logits))
            return super().__call__(logits, *rest)

    monkeypatch.setattr("outrider.heads.choose.RANKED_AT_ONCE", 2 * V)
    monkeypatch.setattr(choose.backend, "top_next", Noting())
    assert all(map(torch.equal, choose.next_tokens(*given), expected)) and sizes == [2, 2, 1]


def test_a_tree_without_paths_is_empty_beside_others() -> None:
    choose, (table,) = chooser(None), tables(1)
    cases: list[list[list[tuple[int, ...]]]] = [[[]], [[], [(0,), (0, 0)]]]
    for shapes in cases:
        trees = [RankTree(row_at(0.0), shape, BASE, table) for shape in shapes]
        growth = on_device(trees, choose)
        assert growth is not None
        grow_on_device(growth, choose, [*range(len(trees))], lambda step, at: None)
        assert [len(tree.draft_tree.tokens) for tree in trees] == [*map(len, shapes)]


def test_trees_of_one_pass_are_read_together() -> None:
    choose, shape = chooser(None), [path for path in paths(next(iter(MEDUSA.values()))) if max(path) < V][:9]

    def made() -> list[BlockTree]:
        return [
            BlockTree(row_at(t, top_k), torch.stack([logits_of(i, (level,)) for level in range(6)]), shape)
            for i, (t, top_k) in enumerate([(0.0, 0), (0.8, 0), (0.8, 2)])
        ]

    expected, trees = made(), made()
    for tree in expected:
        tree.grow(choose)
    with Syncs() as seen:
        grow_blocks(trees, choose)
    assert [tree.draft_tree[:2] for tree in trees] == [tree.draft_tree[:2] for tree in expected]
    assert seen.seen == ["tolist"]


def test_a_row_with_processors_or_samples_leaves_trees_to_the_host() -> None:
    choose, (table,) = chooser(None), tables(1)
    tree = DynamicTree(row_at(0.0), table, BASE, Budget(2, 4), 2)
    assert on_device([tree], choose) is not None
    assert on_device([], choose) is None
    assert on_device([tree, RankTree(row_at(0.5), [(0,)], sampled=True)], choose) is None
    tree.row.processors = [object()]  # type: ignore[list-item]
    assert on_device([tree], choose) is None
    cpu: Any = SimpleNamespace(backend=backend_for(torch.device("cpu"), torch.float32))
    if cpu.backend.name.startswith("C"):
        compiled: Any = SimpleNamespace(vocabulary=V, decoder=cpu, sampler=None)
        assert on_device([DynamicTree(row_at(0.0), table, BASE, Budget(2, 4), 2)], Chooser(compiled)) is None


@pytest.mark.parametrize("name", ["eagle", "eagle3", "hydra", "medusa", "peagle", "dflash"])
def test_a_head_is_read_once_a_step_and_drafts_as_by_level(
    name: str, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The trees of several rows, with the torch kernels, and the texts of plain decoding."""
    monkeypatch.setenv("OUTRIDER_KERNELS", "torch")
    monkeypatch.setattr("outrider.backends.torch.sampling.FIRST_LOOKS", {})
    llm = LLM(str(tiny), enable_prefix_caching=False)
    params = [SamplingParams(temperature=t, seed=1, max_tokens=8, ignore_eos=True) for t in (0.0, 0.9)]
    prompts = [{"prompt_token_ids": ids} for ids in random_prompts(2, seed=2, longest=12)]

    def texts() -> list[Any]:
        return [visible_parts(o.outputs) for o in llm.generate(prompts, params, use_tqdm=False)]

    plain, found = texts(), list[list[Any]]()
    for by_level in (False, True):
        use_example(llm, name)
        trees, reads, propose = list[Any](), list[int](), llm.engine.drafter.propose

        def noting(batch: Any, trees: Any = trees, reads: Any = reads, propose: Any = propose) -> Any:
            with Syncs() as seen:
                draft = propose(batch)
            trees += [tree[:2] for tree in draft.trees]
            reads.append(len(seen.seen))
            return draft

        monkeypatch.setattr(llm.engine.drafter, "propose", noting)
        if by_level:
            monkeypatch.setattr(Chooser, "stays_on_device", lambda choose, rows: False)
        assert texts() == plain
        assert by_level or max(reads) == 1
        found.append(trees)
        check_idle(llm)
    assert found[0] == found[1] and any(tokens for tokens, _ in found[0])


def test_a_head_reads_the_states_of_many_plain_steps_before_it_drafts(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a rest its trees are those of a head that grows them by level, which reads all states at once."""
    monkeypatch.setenv("OUTRIDER_KERNELS", "torch")
    llm, found, lengths = LLM(str(tiny), enable_prefix_caching=False), list[list[Any]](), list[list[int]]()
    prompts = [{"prompt_token_ids": ids} for ids in random_prompts(2, seed=2, longest=12)]
    params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
    for by_level in (False, True):
        use_example(llm, "eagle")
        drafter, trees, read = llm.engine.drafter, list[Any](), list[int]()
        propose, forward = drafter.propose, drafter.net.forward

        def resting(batch: Any, trees: Any = trees, propose: Any = propose) -> Any:
            plain = batch[0].row.steps % 16 < 14
            draft = propose(batch.within([NO_BUDGET] * len(batch)) if plain else batch)
            trees += [tree[:2] for tree in draft.trees]
            return draft

        def noting(step: Any, *given: Any, read: Any = read, forward: Any = forward) -> Any:
            read.append(step.length)
            return forward(step, *given)

        monkeypatch.setattr(drafter, "propose", resting)
        monkeypatch.setattr(drafter.net, "forward", noting)
        if by_level:
            monkeypatch.setattr(Chooser, "stays_on_device", lambda choose, rows: False)
        llm.generate(prompts, params, use_tqdm=False)
        found.append(trees)
        lengths.append(read)
    assert found[0] == found[1] and any(tokens for tokens, _ in found[0])
    assert lengths[0] != lengths[1]
