"""Plain steps in a row during which no drafter is considered."""

from __future__ import annotations

from dataclasses import dataclass, field

from outrider.core.clock import Times
from outrider.core.row import Row


@dataclass(slots=True)
class Rest:
    """rows: of the last step.  longest: steps until drafters are considered for them; closed: until they are
    for a new row.

    taken: steps so far.  seconds: of each that only decoded, since costs were last taken in.  propose: of
    their idle drafters together.
    """

    rows: list[Row]
    longest: int
    closed: int
    taken: int = 0
    seconds: list[float] = field(default_factory=list)
    propose: float = 0.0

    def goes_on(self, rows: list[Row]) -> bool:
        """Count a step, unless the rest is over before it."""
        if rows != self.rows:
            if not set(rows).issubset(self.rows):
                self.longest = min(self.longest, self.closed)
            self.rows = rows
        self.taken += 1
        return self.taken <= self.longest

    def add(self, times: Times) -> None:
        self.seconds.append(times.forward + times.rest)
        self.propose += times.propose
