"""The scripted drafter's example."""

from __future__ import annotations

from random_trees import make_row

from outrider.core.tree import Budget
from outrider.draft.scripted import tree as scripted_tree


def test_the_scripted_example_is_a_binary_tree() -> None:
    draft_tree = scripted_tree(make_row(list(range(20))), Budget(9, 6))
    assert draft_tree.parents == [-1, -1, 0, 0, 1, 1]
