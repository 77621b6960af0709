"""Plain steps in a row during which no drafter is considered."""

from __future__ import annotations

from dataclasses import dataclass, field

from outrider.control.plan import StepRecord
from outrider.core.clock import Times
from outrider.core.row import Row
from outrider.core.step import Batch

LISTEN = 8  # steps after which what speaks for drafts is looked at again


@dataclass(slots=True)
class Rest:
    """rows: of the last step.  longest: steps until drafters are considered for them; closed: until they are
    for a new row.

    batch: emitting rows when it began.  depth: largest draft that was allowed then.
    moved: other rows run than those that the load was computed for.  fresh: some of them are new.
    taken: steps so far.  promising: rows for which more speaks for a draft than when the rest began.
    Since costs were last taken in: seconds of each step that only decoded, `propose` of their idle drafters
    together, and the records of the other steps.
    """

    rows: list[Row]
    longest: int
    closed: int
    batch: int
    depth: int
    moved: bool
    fresh: bool = False
    taken: int = 0
    promising: int = 0
    seconds: list[float] = field(default_factory=list)
    propose: float = 0.0
    records: list[StepRecord] = field(default_factory=list)

    def repeats(self, batch: Batch) -> bool:
        """Count a step, if nothing has to be looked at in it: the rows are those of the step before."""
        if self.fresh or self.moved or batch.prefill or self.taken >= self.longest:
            return False
        if not (self.taken + 1) % LISTEN or self.rows != [step.row for step in batch]:
            return False
        self.taken += 1
        return True

    def goes_on(self, rows: list[Row], depth: int) -> bool:
        """Count a step, unless the rest is over: by its length, other limits, or far fewer requests."""
        if depth != self.depth or relieved(len(rows), self.batch):
            return False
        if rows != self.rows:
            self.moved = True
            if not set(rows).issubset(self.rows):
                self.longest, self.fresh = min(self.longest, self.closed), True
            self.rows = rows
        self.taken += 1
        return self.taken <= self.longest

    @property
    def listens(self) -> bool:
        """Whether this step looks at what speaks for drafts."""
        return self.depth > 0 and (self.fresh or not self.taken % LISTEN)

    def add(self, times: Times) -> None:
        self.seconds.append(times.forward + times.rest)
        self.propose += times.propose


def relieved(now: int, before: int) -> bool:
    """Whether so many fewer rows run that what did not pay may pay."""
    return 2 * now <= before
