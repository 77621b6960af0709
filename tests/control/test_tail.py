"""Gains that a batch does not see, because its slowest request does not have them."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import mean

import pytest
from crowd import STEP, Crowd, Stream
from simulated import SECONDS, Source

from outrider.control.cost import ForwardCost
from outrider.control.tail import SHARED, Tail
from outrider.core.row import Row
from outrider.testing import make_row

FLAT, STEEP = ForwardCost({1: SECONDS, 64: SECONDS}), ForwardCost({1: SECONDS, 64: 64 * SECONDS})


def take(tail: Tail, rows: Sequence[Row], forward: ForwardCost = FLAT) -> float:
    """Let it take in a step of these rows."""
    return tail.learn(rows, [row for row in rows if row.finish_reason is not None], forward)


def finished(tail: Tail, steps: Sequence[int], rates: Sequence[float], credited: float = 0.0) -> float:
    """Requests that begin together and end one after another.  Returns what the ledger has credited too much.

    credited: seconds for each request.
    """
    rows = [
        make_row([0] * (8 + round(count * rate)), 8, id=str(i), limit=500)
        for i, (count, rate) in enumerate(zip(steps, rates))
    ]
    lost = 0.0
    tail.credit(credited * len(rows), sum(len(row.tokens) - row.prompt for row in rows))
    for now in sorted(set(steps)):
        running = [row for row in rows if row.finish_reason is None]
        for row, count in zip(rows, steps):
            row.steps = min(now, count)
            row.finish_reason = "stop" if count <= now else None
        lost += take(tail, running)
    return lost


def learned(steps: Sequence[int], rates: Sequence[float]) -> Tail:
    tail = Tail()
    for _ in range(30):
        finished(tail, steps, rates)
    return tail


def test_a_token_is_worth_its_share_where_all_rows_gain_alike() -> None:
    tail = learned([40] * 4 + [60] * 4, [2.5] * 8)
    assert tail.shared == pytest.approx(1.0, abs=0.01) and tail.replaced == 0
    assert tail.token_value(8, FLAT) == pytest.approx(tail.shared)


def test_gains_of_some_rows_count_less_while_the_others_go_on() -> None:
    tail = learned([20] * 4 + [80] * 4, [4.0] * 4 + [1.25] * 4)
    assert tail.shared == pytest.approx(0.25 / (0.8 * 1.25 + 0.2 * 4 - 1), abs=0.01)
    assert tail.token_value(8, FLAT) == pytest.approx(tail.shared)
    assert tail.token_value(8, STEEP) == pytest.approx(1.0), "every row that ends shortens the steps"
    assert tail.token_value(1, FLAT) == 1.0


def test_gains_of_some_rows_count_in_full_where_others_take_their_places() -> None:
    tail = Tail(shared=0.3)
    rows = [make_row([0] * 40, 8, id=str(i), limit=500, steps=8 * i) for i in range(8)]
    rows[7].finish_reason = "stop"
    for _ in range(40):
        take(tail, rows)
    assert tail.replaced > 0.9 and tail.token_value(8, FLAT) > 0.9


def test_plain_rows_say_nothing_of_the_gains_and_what_was_seen_is_forgotten() -> None:
    assert learned([40] * 8, [1.0] * 8).shared == SHARED
    tail = Tail(shared=0.0)
    for _ in range(30):
        finished(tail, [40] * 8, [1.0] * 8)
    assert 0.5 < tail.shared < SHARED


def test_what_a_batch_was_credited_beyond_plain_decoding_is_lost_when_it_has_emptied() -> None:
    """The longest answer of 100 tokens takes 100 plain steps, however few rows run in the last ones."""
    lost = finished(Tail(), [20] * 4 + [80] * 4, [4.0] * 4 + [1.25] * 4, credited=20 * SECONDS)
    assert lost == pytest.approx((8 * 20 - 100) * SECONDS)
    assert finished(Tail(), [40] * 8, [1.0] * 8, credited=20 * SECONDS) == 0.0, "without drafts nothing is"


def test_plain_decoding_is_as_slow_as_each_number_of_requests_was() -> None:
    """A step of 16 requests takes more than the forward alone, one of few does not."""
    forward = ForwardCost({1: SECONDS, 64: SECONDS})
    forward.paces = {1: 1.0, 2: 1.0, 15: 1.6, 16: 1.6}
    tail = Tail()
    rows = [make_row([0] * 68, 8, id=str(i), limit=500, steps=20) for i in range(16)]
    rows[15].tokens.append(0)
    tail.credit((60 * 1.6 + 1) * SECONDS, 16 * 60 + 1)
    for row in rows[:15]:
        row.finish_reason = "stop"
    assert take(tail, rows, forward) == 0.0
    rows[15].finish_reason = "stop"
    assert take(tail, rows[15:], forward) == pytest.approx(0.0, abs=SECONDS / 10)


@pytest.mark.parametrize("left", [1, 3])
def test_a_batch_of_which_rows_were_aborted_gives_no_credit(left: int) -> None:
    tail = Tail()
    rows = [make_row([0] * 90, 8, id=str(i), limit=500, steps=20) for i in range(4)]
    tail.credit(82 * SECONDS, 4 * 82)
    rows[0].finish_reason = "stop"
    if left == 3:  # before any had ended
        rows = rows[:3]
    take(tail, rows)
    for row in rows[1:3]:
        row.finish_reason = "stop"
    assert take(tail, rows[1:3]) == 0.0
    assert not tail.ended and not tail.emitted


def test_requests_whose_prompts_took_some_steps_have_begun_together() -> None:
    """With drafts the first one ends when the last one has hardly begun."""
    tail, lost, lengths = Tail(), 0.0, (15, 40, 60)
    rows = [make_row([0] * (8 + count), 8, id=str(count), limit=500) for count in lengths]
    tail.credit(1.0, sum(lengths))
    for ended, count in enumerate(lengths):
        steps = count // 3 + 2 * ended  # of the first one
        for late, row in enumerate(rows):
            row.steps = steps - 2 * late
        rows[ended].finish_reason = "stop"
        lost += take(tail, rows[ended:])
    assert not tail.replaced and lost == pytest.approx(1.0 - 60 * SECONDS)


def test_requests_that_began_one_after_the_other_are_not_taken_for_a_batch() -> None:
    tail = Tail()
    first, second = (make_row([0] * 108, 8, id=str(i), limit=500) for i in range(2))
    tail.credit(150 * SECONDS, 200)
    first.steps, second.steps, first.finish_reason = 40, 20, "stop"
    assert take(tail, [first, second]) == 0.0
    second.steps, second.finish_reason = 40, "stop"
    assert take(tail, [second]) == 0.0
    assert tail.shared == SHARED


def test_short_requests_beside_a_long_one_are_not_kept() -> None:
    tail, long = Tail(), make_row([0] * 100, 8, id="long", limit=5000)
    for i in range(100):
        long.steps += 10
        short = make_row([0] * 18, 8, id=str(i), limit=500, steps=10)
        short.finish_reason = "stop"
        take(tail, [long, short])
    assert len(tail.ended) < 3 and len(tail.running) == 1


def stream(
    acceptances: Sequence[float], rows: int, node: float, fixed: float, seed: int, beside: float = 0.0
) -> Stream:
    """Batches of requests of 64 tokens whose drafts are accepted more or less often."""
    sources = [Source(fixed * STEP, 0.0, 1.0, [acceptance], False) for acceptance in acceptances]
    crowd = Crowd.make(sources, [0.0] * len(sources), rows, 8 * rows, seed, node, 0.3)
    crowd.ends, crowd.beside = [64] * len(crowd.ends), beside
    return Stream(crowd, seed)


def apart(acceptances: Sequence[float], rows: int, node: float, fixed: float, seed: int) -> float:
    """Time over plain decoding's."""
    return mean(stream(acceptances, rows, node, fixed, seed).run_apart()[2:])


@pytest.mark.parametrize("beside", [0.0, 0.1])
def test_batches_that_gain_leave_no_debt(beside: float) -> None:
    """beside: plain steps that each request takes beside the forward."""
    made = stream([0.75], 16, 0.003, 0.3, 1, beside)
    assert mean(made.run_apart()[2:]) < 0.9
    assert made.controller.evidence.ledger.room > 0


def test_batches_end_hardly_later_than_by_plain_decoding() -> None:
    """Though some of their requests gain much."""
    assert mean([apart([0.45], 16, 0.003, 0.3, seed) for seed in range(4)]) < 1.06


def test_batches_whose_slowest_requests_gain_are_drafted_for() -> None:
    assert mean([apart([0.75], 16, 0.003, 0.3, seed) for seed in range(4)]) < 0.9
