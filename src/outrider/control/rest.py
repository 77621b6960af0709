"""Plain steps in a row during which no drafter is considered.

A step of a rest is counted, and its seconds are noted; nothing else is done for as many rows as in the step
before.  What the steps have shown is taken in every `SETTLE` steps, when other numbers of rows run, and at
the end.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from outrider.control.crowds import relieved
from outrider.control.evidence import LONGEST_PAUSE
from outrider.control.plan import Load, StepRecord
from outrider.control.planner import Planner
from outrider.control.waits import may_pay
from outrider.core.clock import Times
from outrider.core.row import Row
from outrider.core.step import Batch

PROMISED = 4  # tokens that a promising row may gain
MOST_RECORDS = 16  # that wait: taken in together, they cost a quarter
# Steps after which what speaks for drafts is looked at again, at least and at most, and the part of a plain
# step that this takes, between the two: look-ups for many rows take long beside a small model.
LISTEN, MOST_LISTEN = 8, 32
LISTENING = 0.002
SETTLE = 32  # steps after which they are taken in


@dataclass(slots=True)
class Rest:
    """Plain steps since no drafter was found to pay, and how long that is taken for granted.

    load: of the last steps that were taken in, at first of the one in which it began.
    longest: steps until drafters are considered again; closed: until they are for a new row.
    need: seconds that have to be left for the shortest draft.
    crowd: emitting rows when it began.  depth: largest draft that was allowed then.
    clock: returns seconds.
    rows: of the last step.  taken: steps so far.  quiet: steps until one has to be looked at.
    listen_at, settle_at: steps at which all rows are looked at, and the steps so far are taken in.
    promising: open rows that would ask together, since more speaks for their drafts than at the last look;
    none if a rest is over for another reason.
    Since costs were last taken in:
    decoded: the last step that only decoded; seconds: of each of them; propose: of idle drafters in them.
    beside: tokens that were emitted beside prompts.  records: of steps that tell more.
    """

    planner: Planner
    load: Load
    longest: int
    closed: int
    need: float
    depth: int
    rows: int
    clock: Callable[[], float]
    crowd: int = 0
    taken: int = 0
    quiet: int = 0
    listen_at: int = LISTEN
    settle_at: int = SETTLE
    promising: set[Row] = field(default_factory=set)
    decoded: Batch | None = None
    seconds: list[float] = field(default_factory=list)
    propose: float = 0.0
    beside: int = 0
    records: list[StepRecord] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.crowd = self.load.batch

    def repeats(self, batch: Batch) -> bool:
        """Count a step, if nothing has to be looked at in it: as many rows decode as in the step before."""
        if self.taken >= self.quiet or batch.prefill or len(batch) != self.rows:
            return False
        self.taken += 1
        return True

    def goes_on(self, batch: Batch, look_seconds: float) -> bool:
        """Count any step, unless the rest is over: by its length, other limits, far fewer requests, or
        because a plan for the `promising` rows may pay.
        """
        joined = batch.prefill or len(batch) > self.rows
        if joined:
            self.longest = min(self.longest, self.closed)
        if self._over(len(batch), look_seconds):
            self.promising = set()
            return False
        self.taken += 1
        found: set[Row] | None = None
        if self.taken >= self.listen_at:
            found = self._listen(batch, look_seconds)
        elif joined and self.depth:
            new = [step.row for step in batch if step.emits and not step.row.steps]
            others = {row for row in self.promising if row.finish_reason is None}
            found = self._promising(new, look_seconds, others)
        if found is not None:
            self.promising = found
            if len(found) * PROMISED * self.load.token > look_seconds:
                return False
        self.quiet = min(self.longest, self.listen_at - 1)
        return True

    def _over(self, rows: int, look_seconds: float) -> bool:
        """Whether a rest is over by its length, or by the number of rows.

        It becomes longer where making plans, and a draft, would take more than may be lost, unless drafts of
        a new row are expected to pay.
        """
        if rows != self.rows:
            if self.planner.limits.depth_for(rows) != self.depth or relieved(rows, self.crowd):
                return True
            self.rows = rows
        if self.taken >= self.longest and self.closed and (lacks := self._lacks(look_seconds)) > 0:
            needed = math.ceil(lacks / (self.load.loss_share * self.load.token * self.rows))
            self.longest = self.taken + min(LONGEST_PAUSE, needed)
        return self.taken >= self.longest

    def _lacks(self, look_seconds: float) -> float:
        """Seconds missing for plans and then for the shortest draft.

        Plans alone would use up what is earned for drafts.
        """
        load, evidence = self.load, self.planner.evidence
        earned = load.loss_share * load.token * (self.rows * len(self.seconds) + self.beside)
        return look_seconds + self.need + evidence.host - evidence.ledger.left - earned

    def _listen(self, batch: Batch, look_seconds: float) -> set[Row] | None:
        """Take in steps, if it is time, and look at all rows.  Returns those of `_promising`."""
        if self.taken >= self.settle_at:
            self.settle_at = self.taken + SETTLE
            self.settle()
        began = self.clock()
        rows = [step.row for step in batch if step.emits]
        found = self._promising(rows, look_seconds, set()) if self.depth else None
        pause = math.ceil((self.clock() - began) / (LISTENING * self.load.decode))
        self.listen_at = self.taken + max(LISTEN, min(MOST_LISTEN, pause))
        return found

    def _promising(self, rows: Sequence[Row], look_seconds: float, others: set[Row]) -> set[Row] | None:
        """Rows that would ask together: these, as far as something speaks for their drafts, and `others`.

        None unless more speaks for one of them than at the last look, and while there is no room for a plan.
        Empty where a plan would not pay.
        """
        load, evidence = self.load, self.planner.evidence
        if self._lacks(look_seconds) >= 0:
            return None
        able = [row for row in rows if row.draft_depth]
        promising = [evidence.promising(row) for row in able]  # of all: a grade that falls may rise again
        if not any(promising):
            return None
        graded = [row for row in able if any(arm.grade(row) for arm in self.planner.arms)]
        found = others.union(graded)
        pays = any(may_pay(self.planner, row, load, len(found)) for row in graded)
        return found if pays else set()

    def settle(self) -> None:
        """Hand over the steps since costs were last taken in."""
        if self.records:
            self.planner.evidence.learn(self.records)
            self.records = []
        self._settle_plain()

    def _settle_plain(self) -> None:
        """Hand over those without a record."""
        evidence = self.planner.evidence
        if self.decoded is not None:
            self.load = Load.of(self.decoded, evidence.forward, evidence.tail)
        if self.seconds or self.beside:
            evidence.rested(self.load, self.seconds, self.propose, self.beside)
            self.decoded, self.seconds, self.propose, self.beside = None, [], 0.0, 0

    def add_record(self, batch: Batch, times: Times, once: float, at_once: bool) -> None:
        """Add a step with forced text, or whose prompts drafters compute.

        once: seconds of one-time work in it.  at_once: hand over the steps, even if they are few.
        """
        evidence, seconds = self.planner.evidence, times.forward + times.rest
        load = Load.of(batch, evidence.forward, evidence.tail)
        ended = any(step.row.finish_reason is not None for step in batch)
        self.records.append(StepRecord(batch, load, {}, times.propose, seconds, {}, ended, once))
        if at_once or len(self.records) >= MOST_RECORDS:
            self.settle()

    def add(self, batch: Batch, times: Times) -> None:
        if batch.prefill:
            self.beside += sum([step.emits for step in batch])
            return
        if self.decoded is not None and len(self.decoded) != len(batch):
            self._settle_plain()
        self.decoded = batch
        self.seconds.append(times.forward + times.rest)
        self.propose += times.propose
