"""Plain steps in a row during which no drafter is considered."""

from __future__ import annotations

from dataclasses import dataclass, field

from outrider.control.evidence import Evidence
from outrider.control.ledger import SHARE
from outrider.control.plan import Load, StepRecord
from outrider.core.clock import Times
from outrider.core.row import Row
from outrider.core.step import Batch

PROMISED = 4  # tokens that a promising row may gain
MOST_RECORDS = 16  # that wait: taken in together, they cost a quarter
LISTEN = 8  # steps after which what speaks for drafts is looked at again


@dataclass(slots=True)
class Rest:
    """Plain steps since no drafter was found to pay, and how long that is taken for granted.

    rows: of the last step.  longest: steps until drafters are considered for them; closed: until they are
    for a new row.
    need: seconds that have to be left for the shortest draft.
    batch: emitting rows when it began.  depth: largest draft that was allowed then.
    moved: other rows run than those that the load was computed for.  fresh: some of them are new.
    taken: steps so far.  promising: rows for which more speaks for a draft than when the rest began.
    Since costs were last taken in: seconds of each step that only decoded, `propose` of their idle drafters
    together, and the records of the other steps.
    """

    rows: list[Row]
    longest: int
    closed: int
    need: float
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

    def promises(self, batch: Batch, evidence: Evidence, load: Load, look_seconds: float) -> bool:
        """Whether so much speaks for drafts that did not when the rest began that a plan may pay."""
        self.fresh = False in [step.emits for step in batch]
        # room for the plan and then for a draft: otherwise plans would use up what is earned for drafts
        if evidence.ledger.room + SHARE * self.taken * load.decode <= look_seconds + self.need:
            return False
        rows = [step.row for step in batch if step.emits]
        if self.taken % LISTEN:
            rows = [row for row in rows if not row.steps]  # the new ones
        self.promising += sum([evidence.promising(row) for row in rows if row.draft_depth])
        return self.promising * PROMISED * load.token > look_seconds

    def settle(self, evidence: Evidence, load: Load) -> None:
        """Hand over the steps since costs were last taken in."""
        if self.records:
            evidence.learn(self.records)
            self.records = []
        self.settle_plain(evidence, load)

    def settle_plain(self, evidence: Evidence, load: Load) -> None:
        """Hand over those that only decoded, before the load changes."""
        if self.seconds:
            evidence.rested(load, self.seconds, self.propose)
            self.seconds, self.propose = [], 0.0

    def drop_ended(self, evidence: Evidence, load: Load) -> None:
        """Drop the rows that ended, after which the load is another one."""
        self.rows, self.moved = [row for row in self.rows if row.finish_reason is None], True
        if not self.rows:
            self.settle(evidence, load)

    def add_record(self, record: StepRecord, at_once: bool, evidence: Evidence, load: Load) -> None:
        """Add a step with prompt tokens or forced text.  Hand over the steps at once, or if they are many."""
        self.records.append(record)
        if at_once or len(self.records) >= MOST_RECORDS:
            self.settle(evidence, load)

    def add(self, times: Times) -> None:
        self.seconds.append(times.forward + times.rest)
        self.propose += times.propose


def relieved(now: int, before: int) -> bool:
    """Whether so many fewer rows run that what did not pay may pay."""
    return 2 * now <= before
