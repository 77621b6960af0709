"""Known tokens and draft trees as rows of a forward."""

from __future__ import annotations

from array import array

from helpers import attended_slots, requests_of
from hypothesis import given
from hypothesis import strategies as st
from random_trees import make_row, path_to, trees

from outrider.core.step import RowStep
from outrider.core.step_input import StepInput
from outrider.core.tree import DraftTree
from outrider.engine.runner import add_row


@given(
    st.lists(st.tuples(st.integers(1, 20), st.integers(0, 19), trees(8)), min_size=1, max_size=3),
    st.randoms(use_true_random=False),
)
def test_every_row_attends_to_its_own_past_in_order(
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
