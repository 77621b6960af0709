"""Token trees: as data, under the controller's scissors, and as rows of attention."""

from __future__ import annotations

from array import array

import pytest
import torch
from helpers import attended_slots, requests_of
from hypothesis import given
from hypothesis import strategies as st

from outrider import SamplingParams
from outrider.control.fixed import FixedController, Options
from outrider.core.row import Row
from outrider.core.step import Batch, RowStep
from outrider.core.step_input import StepInput
from outrider.core.tree import ROOT, Budget, Draft, DraftTree, Resume
from outrider.draft.scripted import tree as scripted_tree
from outrider.engine.runner import add_row
from outrider.verify.match import Match


@st.composite
def trees(draw: st.DrawFn, most: int = 14) -> DraftTree:
    """A random tree with distinct siblings."""
    tokens: list[int] = []
    parents: list[int] = []
    for i in range(draw(st.integers(0, most))):
        parent = draw(st.integers(-1, i - 1))
        taken = [t for t, p in zip(tokens, parents) if p == parent]
        tokens.append(draw(st.integers(0, 30).filter(lambda t, taken=taken: t not in taken)))
        parents.append(parent)
    return DraftTree(tokens, parents, [0.5] * len(tokens))


def path_to(parents: list[int], node: int) -> list[int]:
    """The nodes from the root to `node`, the root left out."""
    return [] if node == ROOT else [*path_to(parents, parents[node]), node]


def make_row(tokens: list[int], new: int = 16, speculate: bool = True) -> Row:
    params = SamplingParams(max_tokens=new, speculate=speculate)
    return Row(
        id="0", index=0, tokens=list(tokens), prompt=len(tokens), params=params,
        distribution=params.distribution, seed=0, processors=(),
        limit=len(tokens) + new, ending=frozenset(),
    )  # fmt: skip


# ---- draft tokens


def test_a_chain_is_a_tree() -> None:
    assert DraftTree.chain([4, 5, 6], [0.1, 0.2, 0.3]) == DraftTree([4, 5, 6], [-1, 0, 1], [0.1, 0.2, 0.3])


# ---- the controller


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
    for trees, kept in (([3, 3], [[ROOT, 0, 1]] * 2), ([1, 3], [[ROOT, 0], [ROOT, 0, 1]])):
        batch = Batch([RowStep(make_row([1, 2]), 1, 1, budget=Budget(n, n)) for n in trees])
        states = torch.arange(6.0)[:, None]
        chain = DraftTree.chain([1, 2, 3], [0.5] * 3)
        branched = DraftTree([1, 2, 3], [-1, -1, 1], [0.5] * 3)
        batch.take(Draft([chain, branched], Resume(2, states, [[ROOT, 0, 1]] * 2)))
        controller().trim(batch)
        assert batch.resume is not None and batch.resume.nodes == kept
        assert batch.resume.states.flatten().tolist() == [0, 1, *([2] if trees[0] == 3 else []), 3, 4, 5]
        batch.cut(batch[1], [1, 2])
        assert batch.resume is None


def batch_of(*rows: Row, known: int = 1) -> Batch:
    batch = Batch()
    for row in rows:
        row.computed = len(row.tokens) - known
        batch.add(row, known)
    return batch


def chunk(row: Row, known: int) -> Batch:
    """The first `known` tokens of a row that has nothing computed."""
    batch = Batch()
    batch.add(row, known)
    return batch


@pytest.mark.parametrize(("remaining", "depth"), [(1, 0), (2, 1), (4, 3), (100, 5)])
def test_last_token_is_not_drafted(remaining: int, depth: int) -> None:
    """A row with one token left needs no draft: the step itself emits it."""
    assert controller().budget(batch_of(make_row([1, 2], remaining))) == [Budget(depth, depth)]


def test_no_drafts_within_a_prompt_or_with_speculate_false() -> None:
    assert controller().budget(batch_of(make_row([1, 2, 3], speculate=False))) == [Budget(0, 0)]
    row = make_row([1, 2, 3])
    assert controller().budget(chunk(row, 2)) == [Budget(0, 0)]
    assert controller().budget(chunk(row, 3)) == [Budget(5, 5)]


def test_the_batch_size_decides() -> None:
    table = controller(
        num_speculative_tokens=4,
        disable_by_batch_size=6,
        num_speculative_tokens_per_batch_size=[[1, 1, 7], [2, 3, 2]],
    )
    assert [table.depth_for(n) for n in (1, 2, 3, 4, 6, 7)] == [7, 2, 2, 4, 4, 0]
    assert table.max_depth == 7
    assert controller(num_speculative_tokens=0).max_depth == 0


# ---- match


class TablePicker:
    """Distributions of a target by a table of paths."""

    def __init__(self, answers: dict[tuple[int, ...], int], default: int = 99) -> None:
        self.answers, self.default = answers, default
        self.asked: list[int] = []

    def pick(self, row: int, node: int, path: list[int]) -> int:
        self.asked.append(node)
        return self.answers.get(tuple(path), self.default)


@given(trees(), st.randoms(use_true_random=False))
def test_match_walks_the_deepest_path_of_the_targets_own_tokens(draft_tree: DraftTree, rng: object) -> None:
    paths = [path_to(draft_tree.parents, node) for node in range(len(draft_tree.tokens))]
    goal = rng.choice([[], *paths])  # type: ignore[attr-defined]
    tokens = [draft_tree.tokens[i] for i in goal]
    picker = TablePicker({tuple(tokens[:i]): tokens[i] for i in range(len(tokens))})
    batch = batch_of(make_row([1, 2]))
    batch.take(Draft([draft_tree]))
    Match()(batch, picker)
    assert (batch[0].accepted, batch[0].emitted) == (goal, [*tokens, 99])
    assert picker.asked == [ROOT, *goal], "one question a level, at the nodes of the path"


def test_prompt_chunk_emits_nothing() -> None:
    batch = chunk(make_row([1, 2, 3]), 2)
    Match()(batch, TablePicker({}))
    assert (batch[0].accepted, batch[0].emitted) == ((), ())


# ---- the plan


@given(
    st.lists(st.tuples(st.integers(1, 20), st.integers(0, 19), trees(8)), min_size=1, max_size=3),
    st.randoms(use_true_random=False),
)
def test_a_plan_lets_every_row_see_its_own_past_in_order(
    rows: list[tuple[int, int, DraftTree]], rng: object
) -> None:
    """By the definition: a known token at p sees positions 0 … p; node i sees all known tokens, its ancestors
    and itself.
    """
    step_input, expected = StepInput(), []  # of each row: (id, position, slots of its keys in order)
    slots = list(range(200))
    rng.shuffle(slots)  # type: ignore[attr-defined]
    for length, start, draft_tree in rows:
        start = min(start, length - 1)
        row = make_row([rng.randint(0, 30) for _ in range(length)])  # type: ignore[attr-defined]
        table = array("i", [slots.pop() for _ in range(length + len(draft_tree.tokens))])
        row.table = type("Table", (), {"slots": table})()
        add_row(step_input, RowStep(row, start, length - start, tree=draft_tree))
        for p in range(start, length):
            expected.append((row.tokens[p], p, table[: p + 1].tolist()))
        for node, token in enumerate(draft_tree.tokens):
            path = path_to(draft_tree.parents, node)
            expected.append(
                (
                    token,
                    length + len(path) - 1,
                    [*table[:length].tolist(), *(int(table[length + i]) for i in path)],
                )
            )
    step_input.build()
    assert step_input.input_ids == [e[0] for e in expected]
    assert step_input.positions == [e[1] for e in expected]
    assert step_input.slot_mapping == [e[2][-1] for e in expected], "the last key of a row is its own"
    assert step_input.max_seq_len == max(len(e[2]) for e in expected)
    covered = 0
    for table, first, count in requests_of(step_input):
        assert first == covered
        covered += count
        for i in range(count):
            walked = attended_slots(step_input, table, first + i)
            assert walked == expected[first + i][2], "the C kernels walk the same keys"
    assert covered == step_input.length == len(expected)


def test_the_scripted_example_is_a_binary_tree() -> None:
    draft_tree = scripted_tree(make_row(list(range(20))), Budget(9, 6))
    assert draft_tree.parents == [-1, -1, 0, 0, 1, 1]
