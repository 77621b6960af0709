"""The fixed controller: budgets by option and batch size, and drafts cut to them."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from random_trees import batch_of, chunk, make_row, path_to, trees

from outrider.control.fixed import FixedController, Options
from outrider.core.step import Batch, RowStep
from outrider.core.tree import ROOT, Budget, Draft, DraftTree, Resume


def controller(size: int = 0, **options: object) -> FixedController:
    return FixedController(Options(**options), 5, lambda depth: size or depth, 1000)  # type: ignore[arg-type]


def trimmed(trees: list[DraftTree], budgets: list[Budget]) -> Batch:
    batch = Batch([RowStep(make_row([1, 2]), 1, 1, budget=budget) for budget in budgets])
    batch.take(Draft(trees))
    controller().trim(batch)
    return batch


@given(st.lists(st.tuples(trees(), st.integers(0, 6), st.integers(0, 16)), min_size=1, max_size=4))
def test_trim_is_ancestor_closed_and_within_the_budget(rows: list[tuple[DraftTree, int, int]]) -> None:
    batch = trimmed([tree for tree, _, _ in rows], [Budget(depth, nodes) for _, depth, nodes in rows])
    for (before, depth, nodes), step in zip(rows, batch):
        after = step.tree
        assert after == (before if step.kept is None else before.only(step.kept))
        assert len(after.tokens) <= nodes
        kept = [
            tuple(after.tokens[i] for i in path_to(after.parents, node)) for node in range(len(after.tokens))
        ]
        whole = [
            tuple(before.tokens[i] for i in path_to(before.parents, node))
            for node in range(len(before.tokens))
        ]
        assert all(parent < i for i, parent in enumerate(after.parents))
        assert all(len(path) <= depth for path in kept)
        assert len(set(kept)) == len(kept) and set(kept) <= set(whole), "a node was cut from its ancestors"
        shallow = [path for path in whole if len(path) <= depth]
        assert kept == shallow[:nodes], "a node that had room was dropped"


@given(st.lists(trees(), min_size=1, max_size=3))
def test_trim_leaves_a_draft_within_its_budget_untouched(rows: list[DraftTree]) -> None:
    for tree, step in zip(rows, trimmed(rows, [Budget(20, 20)] * len(rows))):
        assert step.tree is tree and step.kept is None


@pytest.mark.parametrize(
    ("tokens", "parents"),
    [([5, 6], [-1, 1]), ([5, -1], [-1, 0]), ([5, 1 << 40], [-1, 0]), ([5, 6, 6], [-1, 7, 1])],
)
def test_trim_drops_what_cannot_be_even_within_the_budget(tokens: list[int], parents: list[int]) -> None:
    batch = trimmed([DraftTree(tokens, parents, [0.5] * len(tokens))], [Budget(9, 9)])
    assert batch[0].tree == DraftTree([5], [-1], [0.5]) and batch[0].kept == [0]


def test_verification_resumes_from_the_first_nodes_of_a_draft_that_was_cut() -> None:
    """K/V of the lower layers is in the slots of the nodes' numbers, which only the first nodes keep."""
    for sizes, kept in (([3, 3], [[ROOT, 0, 1]] * 2), ([1, 3], [[ROOT, 0], [ROOT, 0, 1]])):
        batch = Batch([RowStep(make_row([1, 2]), 1, 1, budget=Budget(n, n)) for n in sizes])
        states = torch.arange(6.0)[:, None]
        chain = DraftTree.chain([1, 2, 3], [0.5] * 3)
        branched = DraftTree([1, 2, 3], [-1, -1, 1], [0.5] * 3)
        batch.take(Draft([chain, branched], Resume(2, states, [[ROOT, 0, 1]] * 2)))
        controller().trim(batch)
        assert batch.resume is not None and batch.resume.nodes == kept
        assert batch.resume.states.flatten().tolist() == [0, 1, *([2] if sizes[0] == 3 else []), 3, 4, 5]
        batch.cut(batch[1], [1, 2])
        assert batch.resume is None


@pytest.mark.parametrize(("remaining", "depth"), [(1, 0), (2, 1), (4, 3), (100, 5)])
def test_last_token_is_not_drafted(remaining: int, depth: int) -> None:
    """A row with one token left needs no draft: the step itself emits it."""
    assert controller().budget(batch_of(make_row([1, 2], remaining))) == [Budget(depth, depth)]


def test_no_drafts_within_a_prompt_or_with_speculate_false() -> None:
    assert controller().budget(batch_of(make_row([1, 2, 3], speculate=False))) == [Budget(0, 0)]
    row = make_row([1, 2, 3])
    assert controller().budget(chunk(row, 2)) == [Budget(0, 0)]
    assert controller().budget(chunk(row, 3)) == [Budget(5, 5)]


def test_depth_follows_the_batch_size() -> None:
    table = controller(
        num_speculative_tokens=4,
        disable_by_batch_size=6,
        num_speculative_tokens_per_batch_size=[[1, 1, 7], [2, 3, 2]],
    )
    assert [table.depth_for(n) for n in (1, 2, 3, 4, 6, 7)] == [7, 2, 2, 4, 4, 0]
    assert table.max_depth == 7
    assert controller(num_speculative_tokens=0).max_depth == 0
