"""Match verification walks the target's own tokens.  Distributions of all rules: exact/test_rules.py."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from random_trees import batch_of, chunk, make_row, path_to, trees

from outrider.core.tree import ROOT, Draft, DraftTree
from outrider.verify.match import Match


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
