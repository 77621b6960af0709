"""Many clients, each of which sends its next request when the one before has ended, on a simulated clock."""

from __future__ import annotations

from statistics import median

import pytest
from closed_loop import ClosedLoop, Costs

SLOW = Costs(step=23.0, row=0.47, read=0.5, level=0.6, level_row=0.03, draft_read=0.043)


@pytest.mark.parametrize("acceptance", [0.85, 0.95])
@pytest.mark.parametrize("costs, prompts", [(Costs(), (70, 150)), (SLOW, (40, 110))])
def test_drafts_delay_no_first_token_under_load(
    acceptance: float, costs: Costs, prompts: tuple[int, int]
) -> None:
    """About as many rows decode at once as without drafts, and as many tokens are emitted."""
    plain, drafted = (ClosedLoop(given, costs, prompts).run() for given in (None, acceptance))
    assert median(drafted.first.values()) < 1.4 * median(plain.first.values())
    assert drafted.rate > 0.97 * plain.rate


def test_drafts_pay_in_a_batch_in_which_they_save_time() -> None:
    plain, drafted = (
        ClosedLoop(given, SLOW, (40, 110), clients=16, requests=80).run() for given in (None, 0.9)
    )
    assert drafted.rate > 1.3 * plain.rate
