"""Ends of rows: what the scheduler clips of the tokens of a step."""

from __future__ import annotations

from typing import Any

import pytest
from scheduled import FakePool, make_row

from outrider import SamplingParams
from outrider.cache.pages import Cache
from outrider.core.block_table import PAGE
from outrider.core.row import Row
from outrider.core.step import RowStep
from outrider.core.tree import Budget, DraftTree
from outrider.engine.scheduler import Hooks, Limits, Scheduler


def stepped(row: Row, answer_text: list[int], nodes: list[int], **given: Any) -> RowStep:
    """One step in which `row` computed its whole prompt and these tokens were emitted."""
    cache = Cache(20, 20 * PAGE)
    cache.pools = [FakePool()]  # type: ignore[list-item]
    scheduler = Scheduler(cache, Limits(4, 64), Hooks(lambda rows: 8))
    for name, value in given.items():
        setattr(row, name, value)
    scheduler.add(row)
    batch = scheduler.next()
    scheduler.reserve(batch, [Budget(len(nodes), len(nodes))])
    batch[0].accepted, batch[0].emitted = nodes, answer_text
    scheduler.clip(batch)
    scheduler.commit(batch)
    return batch[0]


def test_clip_at_eos_in_the_middle_of_an_accepted_path() -> None:
    step = stepped(make_row("a", [9, 9], 10), [3, 7, 4, 5], [0, 1, 2], ending=frozenset({7}))
    row = step.row
    assert row.output == [3, 7] and row.finish_reason == "stop" and row.stop_reason is None
    assert step.emitted == [3, 7] and step.accepted == [0]
    assert row.computed == 3, "nothing past the end is committed"


@pytest.mark.parametrize(
    ("nodes", "sources"),
    [([0, 1, 2], ["ngram", "ngram"]), ([0, 1], ["ngram", "ngram"]), ([0], ["ngram", None])],
)
def test_a_drafted_token_that_ends_a_row_names_its_drafter(
    nodes: list[int], sources: list[str | None]
) -> None:
    emitted = [3, 7, 4, 5][: len(nodes) + 1]
    step = stepped(make_row("a", [9, 9], 10), emitted, nodes, ending=frozenset({7}))
    step.tree = DraftTree.chain([3, 7, 4][: len(nodes)], [1.0] * len(nodes))
    step.count(0.0, True, ["ngram"])
    assert step.row.output == [3, 7] and step.row.sources == sources


def test_an_interrupted_count_leaves_no_sources() -> None:
    row = stepped(make_row("a", [9, 9], 10), [3, 4], [0]).row
    row.sources = ["ngram", None]  # the interrupt came before the tokens had arrived
    row.undo()
    assert (row.output, row.sources) == ([], [])


def test_clip_at_a_stop_token_sets_stop_reason() -> None:
    params = SamplingParams(max_tokens=10, stop_token_ids=[4])
    row = stepped(make_row("a", [9, 9], 10), [3, 4, 5], [0, 1], ending=frozenset({4, 7}), params=params).row
    assert row.output == [3, 4] and row.stop_reason == 4


def test_clip_at_the_length() -> None:
    step = stepped(make_row("a", [9, 9], 2), [3, 4, 5, 6], [0, 1, 2])
    assert step.row.output == [3, 4] and step.row.finish_reason == "length" and step.accepted == [0]


def test_the_last_allowed_token_may_be_the_end() -> None:
    row = stepped(make_row("a", [9, 9], 2), [3, 7], [0], ending=frozenset({7})).row
    assert row.finish_reason == "stop"
