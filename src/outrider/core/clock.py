"""Work and times of steps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from outrider.core.step import Batch


class Times(NamedTuple):
    """Seconds of one step: drafting, the target's forward, everything else."""

    propose: float = 0.0
    forward: float = 0.0
    rest: float = 0.0


NO_TIMES = Times()


@dataclass(slots=True)
class Work:
    """Sums over steps: known, draft (`guessed`) and emitted tokens, and seconds by phase."""

    steps: int = 0
    known: int = 0
    guessed: int = 0
    emitted: int = 0
    times: Times = NO_TIMES

    def add(self, batch: Batch, times: Times) -> None:
        self.steps += 1
        for step in batch:
            self.known += step.known
            self.guessed += len(step.tree.tokens)
            self.emitted += len(step.emitted)
        self.times = Times(*map(sum, zip(self.times, times)))
