"""The catch-up cursor against a naive model that records every position on its own."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from torch import Tensor

from outrider.cache.catch_up import CatchUp, Cursor
from outrider.testing import make_row


def states_of(start: int, count: int) -> Tensor:
    """[count, 2]: every position has a state of its own."""
    positions = torch.arange(start, start + count).float()
    return torch.stack([positions, -positions], dim=1)


class Steps(RuleBasedStateMachine):
    """One request through chunks, accepted and rejected drafts, prefix hits, failed steps and preemptions.

    The model keeps a set of positions that have K/V, and a list of positions whose states are pending.
    """

    @initialize(offset=st.integers(0, 1), overlap=st.integers(0, 3), hit=st.integers(0, 40))
    def admit(self, offset: int, overlap: int, hit: int) -> None:
        self.offset, self.overlap = offset, overlap
        self.catch_up: CatchUp = CatchUp(offset)
        self.row: Any = make_row([1, 2, 3])
        self._begin(hit)

    def _begin(self, hit: int) -> None:
        """Pages of the first `hit` positions come from the prefix cache."""
        self.row.computed = hit
        self.written = set(range(hit))
        self.pending: list[int] = []
        self.unconfirmed: set[int] = set()

    def _read(self) -> None:
        """Write K/V of all pending states, as a drafter does in one forward."""
        cursor = self.catch_up.cursor(self.row, self.row.computed)
        if cursor.count:
            states = torch.cat(cursor.states)
            assert torch.equal(states, states_of(cursor.first, cursor.count)), "a state at another position"
            self.written |= set(range(cursor.first, cursor.end))
            self.unconfirmed = set(self.pending)
            cursor.mark_written()

    @rule(
        computed=st.integers(1, 9),
        reads=st.booleans(),
        reads_chunk=st.booleans(),
        fails=st.sampled_from(["", "", "", "target", "states lost"]),
    )
    def step(self, computed: int, reads: bool, reads_chunk: bool, fails: str) -> None:
        """A chunk of a prompt, or the pending token and the accepted drafts behind it."""
        start = self.row.computed
        cursor = self.catch_up.cursor(self.row, start)
        if reads:
            self._read()
        if fails == "target":  # the step is repeated
            return
        self.row.computed += computed
        if fails:  # the step is over, but the drafter never saw the states
            return
        cursor.drop_written(self.overlap)
        keep = sorted(self.unconfirmed)[-self.overlap :] if self.overlap else []
        self.pending = [
            position for position in self.pending if position not in self.unconfirmed or position in keep
        ]
        self.unconfirmed = set()
        cursor.append(start, states_of(start, computed))
        if self.pending and self.pending[-1] + 1 != start:
            self.pending = []
        self.pending += range(start, start + computed)
        if reads_chunk:
            self._read()

    @precondition(lambda self: hasattr(self, "row"))
    @rule(hit=st.integers(0, 40))
    def preempt(self, hit: int) -> None:
        self.catch_up.forget(self.row)
        self._begin(min(hit, self.row.computed))

    @invariant()
    def same_as_the_model(self) -> None:
        if not hasattr(self, "row"):
            return
        contiguous = next(
            position for position in range(len(self.written) + 1) if position not in self.written
        )
        if self.row in self.catch_up.cursors:
            cursor = self.catch_up.cursors[self.row]
            assert list(range(cursor.first, cursor.end)) == self.pending
            assert sum(map(len, cursor.states)) == cursor.count
            assert cursor.filled == contiguous
            assert self.catch_up.filled(self.row) == min(self.row.computed, contiguous + self.offset)
        else:
            assert self.catch_up.filled(self.row) == self.row.computed


Steps.TestCase.settings = settings(max_examples=150, stateful_step_count=30, deadline=None)
test_random_steps_match_the_model = Steps.TestCase


def test_kept_states_do_not_hold_their_chunk() -> None:
    cursor = Cursor(0, 0)
    cursor.append(0, states_of(0, 500))
    cursor.mark_written()
    cursor.drop_written(keep=2)
    assert (cursor.first, cursor.count) == (498, 2)
    assert torch.equal(cursor.states[0], states_of(498, 2))
    assert cursor.states[0].untyped_storage().nbytes() == cursor.states[0].nbytes


def test_positions_that_are_computed_again_are_not_filled() -> None:
    cursor = Cursor(8, 8)
    cursor.append(8, states_of(8, 4))
    cursor.mark_written()
    cursor.append(5, states_of(5, 3))
    assert (cursor.filled, cursor.first, cursor.end) == (5, 5, 8)
    cursor.mark_written()
    assert cursor.filled == 8


def test_nothing_behind_a_gap_counts_as_filled() -> None:
    cursor = Cursor(0, 0)
    cursor.append(4, states_of(4, 3))
    cursor.mark_written()
    cursor.drop_written()
    cursor.append(7, states_of(7, 2))
    cursor.mark_written()
    assert cursor.filled == 0
