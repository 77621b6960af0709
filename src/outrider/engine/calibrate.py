"""Cost of the target's forward by its number of rows, for the adaptive controller (control/cost.py).

Forwards of 1 … 64 rows are timed in rounds, the sizes in turns, for at most `SECONDS`.  The minimum of a size
counts: other programs only add time.  The result is kept on disk, in the folder of the
compiled kernels, under a hash of all that it depends on.
"""

from __future__ import annotations

import math
import time
from array import array
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any

from outrider.control.cost import ForwardCost
from outrider.core.device import wait_for
from outrider.core.step_input import StepInput
from outrider.engine.stored import StoredJson
from outrider.models.base import Model

SECONDS, ROUNDS = 0.8, 9
ROWS = (1, 2, 4, 8, 16, 32, 64, 3, 6, 12, 24)  # the most important first, where time is short
WARM_UP = 4  # forwards of every size on a GPU
NEAR, FAR = 32, 480  # positions before the rows
FAR_ROWS = 8  # rows behind `FAR`: one alone reads its context in less time than the noise of its forward


@dataclass
class Measured:
    """Shortest measured times of forwards, in seconds.

    rows:    number of rows -> time, behind `NEAR` positions
    distant: time of `FAR_ROWS` rows behind `far` positions
    rounds:  completed rounds of measurement
    """

    rows: dict[int, float]
    distant: float
    far: int
    rounds: int = 0

    def cost(self) -> ForwardCost:
        seconds = self.least
        near = seconds.get(FAR_ROWS, math.inf)
        each = max(0.0, self.distant - near) / FAR_ROWS / (self.far - NEAR)
        alone = {rows: max(t - rows * NEAR * each, t / 2) for rows, t in seconds.items()}
        return ForwardCost(alone, each)

    @property
    def least(self) -> dict[int, float]:
        """Time by number of rows, ascending: no longer than that of more rows, which other programs delayed
        less.
        """
        found, least = dict[int, float](), math.inf
        for rows in sorted(self.rows, reverse=True):
            found[rows] = least = min(least, self.rows[rows])
        return dict(sorted(found.items()))


def forward_cost(decoder: Model, max_len: int, *about: Any) -> ForwardCost:
    """Cost of the target's forward by its number of rows, read from disk or measured.

    A measurement of less than `ROUNDS` rounds is continued at the next start.  On devices other than a CPU
    or CUDA the cost is unknown at first, and learned while serving.

    about: what the cost depends on beside machine, threads, version and shape
    """
    if decoder.device.type not in ("cpu", "cuda") or max_len < NEAR + max(ROWS):
        return ForwardCost()
    stored = StoredJson("costs", ROWS, FAR_ROWS, decoder.backend.name, decoder.spec, *about)
    found = _read(stored)
    if found is None or found.rounds < ROUNDS:
        found = measure(decoder, max_len, found)
        stored.write(asdict(found))
    return found.cost()


def measure(
    decoder: Model,
    max_len: int,
    found: Measured | None = None,
    clock: Callable[[], float] | None = None,
) -> Measured:
    """Time the forwards, beginning with those that were `found`."""
    far, clock = min(FAR, max_len - FAR_ROWS), clock or time.perf_counter
    pool, table = decoder.pool(far + max(ROWS)), array("i", range(far + max(ROWS)))

    def seconds(rows: int, start: int) -> float:
        step_input = StepInput.of_chain(table, start, [1] * rows)
        step_input.logits_rows = list(range(rows))
        began = clock()
        decoder.forward_step(step_input, pool, {})
        wait_for(decoder.device)
        return clock() - began

    if decoder.device.type == "cuda":  # the first forwards compile kernels, the last one records a graph
        for rows in sorted(ROWS):
            for _ in range(WARM_UP):
                seconds(rows, NEAR)
        seconds(FAR_ROWS, far)
    least = found or Measured({}, math.inf, far)
    began = clock()
    while least.rounds < ROUNDS:
        least.distant = min(least.distant, seconds(FAR_ROWS, far))
        for rows in ROWS:
            if least.rows and clock() - began > SECONDS:
                return least
            least.rows[rows] = min(seconds(rows, NEAR), least.rows.get(rows, math.inf))
        least.rounds += 1
    return least


def _read(stored: StoredJson) -> Measured | None:
    with suppress(ValueError, TypeError, AttributeError, KeyError, ArithmeticError):
        found = Measured(**stored.read())
        found.rows = {int(rows): float(seconds) for rows, seconds in found.rows.items()}
        found.cost()
        return found
    return None
