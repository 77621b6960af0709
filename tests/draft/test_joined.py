"""Drafters that are joined to the configured one see what came of their own tokens, and of no others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from outrider.control.fixed import FixedController, Options
from outrider.core.row import Row
from outrider.core.step import Batch, Commit, RowStep
from outrider.core.tree import Budget, DraftTree
from outrider.draft.union.joined import Joined
from outrider.drafting.base import TextDrafter
from outrider.testing import make_row


@dataclass
class Words(TextDrafter):
    """Proposes a fixed text, and keeps what it is shown."""

    text: list[int]
    name: str
    certain: bool = True  # type: ignore[misc]
    seen: list[tuple[list[int], list[int]]] = field(default_factory=list)

    @property
    def sources(self) -> Sequence[str]:
        return (self.name,)

    def after(self, row: Row, ahead: Sequence[int], budget: Budget) -> DraftTree:
        tokens = self.text[: budget.depth]
        return DraftTree.chain(tokens, [0.5] * len(tokens))

    def observe(self, commit: Commit) -> None:
        self.seen += [(step.tree.tokens, step.accepted) for step in commit.batch if step.tree.tokens]


def step_of(joined: Joined, accepted: int) -> RowStep:
    """A step of one guided row of which so many draft tokens are accepted."""
    row = make_row([1, 2, 3], limit=1000, prediction=[7])
    batch = Batch([RowStep(row, 2, 1)])
    batch[0].budget = joined.budgets(batch, FixedController(Options(), 3, lambda depth: depth, 100))[0]
    batch.take(joined.propose(batch))
    batch[0].accepted = list(range(accepted))
    joined.observe(Commit(batch))
    return batch[0]


@pytest.mark.parametrize(
    ("accepted", "seen"), [(0, []), (1, []), (2, [([5, 6, 7], [])]), (4, [([5, 6, 7], [0, 1])])]
)
def test_tokens_behind_certain_ones_that_failed_are_not_judged(accepted: int, seen: list[Any]) -> None:
    text, certain = Words([5, 6, 7], "text"), Words([8, 9], "certain")
    step = step_of(Joined(text, [certain]), accepted)
    assert step.tree.tokens == [8, 9, 5, 6, 7] and step.tree.source == [1, 1, 0, 0, 0]
    assert text.seen == seen
    assert certain.seen == [([8, 9], list(range(min(2, accepted))))]


def test_uncertain_text_replaces_the_configured_draft() -> None:
    text, other = Words([5, 6, 7], "text"), Words([8, 9], "other", certain=False)
    assert step_of(Joined(text, [other]), 1).tree.tokens == [8, 9]
    assert (text.seen, other.seen) == ([], [([8, 9], [0])])


def test_a_method_that_is_configured_is_not_joined_again() -> None:
    text = Words([5, 6, 7], "text")
    assert step_of(Joined(text, [Words([8], "text")]), 1).tree.tokens == [5, 6, 7]
    assert text.seen == [([5, 6, 7], [0])]
