"""Prompts beside decoding rows: the step stays short, and the prompt gets on."""

from __future__ import annotations

import random

import pytest

from outrider.control.pace import FIRST, PATIENCE, Pace


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("known", [True, False], ids=["idle first", "never idle"])
def test_a_long_prompt_beside_seven_rows(seed: int, known: bool) -> None:
    """A prompt token costs 0.5 ms at first and 3 ms at its end; noise of 10 %."""
    dice, pace, idle = random.Random(seed), Pace(), 0.013
    for _ in range(20 if known else 0):
        pace.learn(7, 0, idle * dice.uniform(1, 1.1))
    done, steps = 0, []
    while done < 8192:
        chunk = min(pace.chunk, 8192 - done)
        seconds = (idle + chunk * (0.0005 + 0.0025 * done / 8192)) * dice.uniform(1, 1.1)
        pace.learn(7, chunk, seconds)
        steps.append(seconds)
        done += chunk
    steps.sort()
    bound = 1 if known else 1.4  # without an idle step the first chunk counts as part of one
    assert steps[int(len(steps) * 0.99)] <= 3 * idle * bound
    assert sum(steps) < 3 * 8192 * 0.00175, "most of the time goes to the prompt"


def test_one_slow_step_is_no_new_normal() -> None:
    pace = Pace()
    for seconds in [0.01] * 20 + [1.0]:
        pace.learn(3, 0, seconds)
    assert pace.plain[3] < 0.013


def test_a_faster_stretch_gets_more_and_a_slower_one_less_at_once() -> None:
    pace = Pace()
    pace.learn(2, 0, 0.01)
    for _ in range(12):
        pace.learn(2, pace.chunk, 0.01 + 0.0001 * pace.chunk)
    assert pace.chunk == pytest.approx((PATIENCE - 1) * 100, rel=0.1)
    pace.learn(2, pace.chunk, 0.01 + 0.001 * pace.chunk)
    assert pace.chunk == pytest.approx((PATIENCE - 1) * 10, rel=0.1)


def test_without_decoding_rows_nothing_is_learned() -> None:
    pace = Pace()
    pace.learn(0, 512, 5.0)
    assert pace.chunk == FIRST and not pace.plain
