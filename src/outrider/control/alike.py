"""Rows that are alike share a choice of drafters: planning for each of many costs more than it gains."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from outrider.control.acceptance import Reach
from outrider.control.choose import Option
from outrider.control.plan import Plan
from outrider.control.row_state import RowState
from outrider.core.row import Row

LATE = 64  # tokens that drafters lack: rows are alike up to so many
LIKELY, FEW = 4, 4  # kinds of rows by the acceptance of their first draft tokens, after so many drafts


class Candidate(NamedTuple):
    """A drafter that one row may ask.

    option: its best depth.  late: seconds to catch up with the row's text.
    pays: it is expected to.  sure: it is by a cautious estimate of what all requests have shown, too.
    """

    option: Option
    late: float
    pays: bool
    sure: bool


class Choice(NamedTuple):
    """Drafters for rows of a kind, and the plan of the first row."""

    chosen: Sequence[Candidate]
    plan: Plan


class Refusal(NamedTuple):
    """Of rows of a kind that may lose no more than `room` seconds: steps until they may get a plan."""

    wait: int
    room: float


Kind = tuple[Any, ...]


def kind_of(row: Row, state: RowState | None, most: int, lacks: Sequence[int]) -> Kind:
    """What the plan of a row depends on, roughly.  `trim` judges the nodes of all rows one by one.

    Rows with a state also differ by the acceptance of their drafts and by the drafters that they may try.

    most: the deepest draft that it may get.  lacks: tokens of its text that the drafters have not computed.
    """
    late = [-(-tokens // LATE) for tokens in lacks]
    what = most, row.steps > 0, row.left_out, row.params.draft_method, *late
    if state is None:  # nothing speaks for drafts: its grades are 0
        return what
    return *what, *[(arm.grade, _likely(arm.reach), arm.retry > row.steps) for arm in state.arms]


def _likely(own: Reach) -> int:
    """How often the first token of a draft of this row was accepted; -1 if that is not known."""
    return -1 if own.asked < FEW else round(LIKELY * own.hits[0] / (own.hits[0] + own.misses[0]))
