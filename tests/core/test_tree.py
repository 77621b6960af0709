"""Draft trees as data."""

from __future__ import annotations

from outrider.core.tree import DraftTree


def test_a_chain_is_a_tree() -> None:
    assert DraftTree.chain([4, 5, 6], [0.1, 0.2, 0.3]) == DraftTree([4, 5, 6], [-1, 0, 1], [0.1, 0.2, 0.3])
