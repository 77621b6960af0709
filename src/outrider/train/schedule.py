"""The learning rate of a run, by steps or by time."""

from __future__ import annotations

import math
import time

PARTS = 100_000  # of the time


def rate_factor(step: int, steps: int, warmup: float) -> float:
    """Learning rate relative to its peak: a linear warm-up, then a cosine to 0."""
    rising = max(1, round(warmup * steps))
    if step < rising:
        return (step + 1) / rising
    return 0.5 * (1 + math.cos(math.pi * (step - rising) / max(1, steps - rising)))


class Schedule:
    """Schedule of the learning rate over a number of steps, or the time from `begin` to a deadline.

    steps: None for the time.  earlier: the share of the schedule that earlier runs have done.
    """

    def __init__(self, steps: int | None) -> None:
        self.steps, self.earlier = steps, 0.0
        self.began, self.deadline = 0.0, math.inf

    def begin(self, deadline: float) -> None:
        """The time starts now.  deadline: of `perf_counter`."""
        self.began, self.deadline = time.perf_counter(), deadline

    def done(self, step: int) -> float:
        """The share in [0, 1] that is done before a step, the first of which is 0."""
        if self.steps is not None:
            return min(1.0, step / self.steps)
        spent = (time.perf_counter() - self.began) / max(1e-9, self.deadline - self.began)
        return min(1.0, self.earlier + (1 - self.earlier) * spent)

    def factor(self, step: int, done: float, warmup: float) -> float:
        """Learning rate of a step relative to its peak.  done: as `done` returned it."""
        if self.steps is not None:
            return rate_factor(step, self.steps, warmup)
        return rate_factor(int(done * PARTS), PARTS, warmup)
