"""A few short answers on a busy machine: the controller keeps the drafter that it knows to pay."""

from __future__ import annotations

from statistics import mean

import pytest
from short_answers import PLAIN, Answers, Kept, Stream
from simulated import SECONDS

COUNT, DEPTH = 8, 4


def known(seed: int) -> Kept:
    """What 30 requests have shown."""
    memory = Kept()
    Stream(Answers.make(30, 1000 + seed), memory, seed).seconds()
    return memory


@pytest.mark.parametrize("slow", [(), (2,)])
def test_two_unlucky_requests_and_a_slow_prefill_leave_no_drafter_out(slow: tuple[int, ...]) -> None:
    """On average it is faster than always drafting, which loses time in the first two."""
    ratios = []
    for seed in range(8):
        env = Answers.make(COUNT, seed, unlucky=2, slow=slow)
        ratios.append(Stream(env, known(seed), seed).seconds() / env.seconds(DEPTH))
    assert mean(ratios) < 0.98


@pytest.mark.parametrize("seed", [0, 5, 11])
def test_a_drafter_that_paid_earlier_may_lose_twenty_steps(seed: int) -> None:
    """No draft token is right any more.  Reading prompts counts, too."""
    env = Answers.make(COUNT, seed, unlucky=COUNT)
    plain = env.seconds(0)
    lost = Stream(env, known(seed), seed).seconds() - 1.01 * plain
    assert lost < 20 * SECONDS * PLAIN < env.seconds(DEPTH) - 1.01 * plain
