"""The number of threads of training: the faster one, and restored."""

from __future__ import annotations

import pytest
import torch

from outrider.online.parallelism import AGAIN, Parallelism, threads


@pytest.fixture(autouse=True)
def two_threads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """torch with two threads; the numbers that it is given."""
    numbers = [2]
    monkeypatch.setattr(torch, "get_num_threads", lambda: numbers[-1])
    monkeypatch.setattr(torch, "set_num_threads", numbers.append)
    return numbers


def test_the_faster_number_of_threads_is_used_and_the_other_tried_again() -> None:
    used, parallelism = list[int](), Parallelism()
    for _ in range(4 * AGAIN):
        used.append(parallelism.count)
        parallelism.learn(used[-1], 5.0 if used[-1] == 2 else 1.0)  # others use the processors
    assert used[:2] == [2, 1] and used.count(2) == 5
    for _ in range(10 * AGAIN):
        used.append(parallelism.count)
        parallelism.learn(used[-1], 0.5 if used[-1] == 2 else 1.0)
    assert used[-AGAIN:].count(2) == AGAIN - 1


def test_an_error_restores_the_number_of_threads(two_threads: list[int]) -> None:
    with pytest.raises(KeyError), threads(1):
        raise KeyError
    assert two_threads == [2, 1, 2]
    with threads(2):
        pass
    assert two_threads == [2, 1, 2], "nothing to set"


def test_one_thread_is_no_choice(two_threads: list[int]) -> None:
    two_threads.append(1)
    parallelism = Parallelism()
    for _ in range(2 * AGAIN):
        with parallelism.timed(10):
            assert parallelism.count == 1
