"""Sums over steps, which enter the ledgers and summaries of rows together."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from outrider.control.plan import Arm, StepRecord, Try
from outrider.control.row_state import RowState
from outrider.core.row import Drafted, Row
from outrider.core.step import RowStep


@dataclass(slots=True)
class Sums:
    """Steps of a row: their number, seconds, those of plain decoding, and those of idle drafters.

    nodes, expected, accepted: as in `Drafted`.
    """

    steps: int = 0
    spent: float = 0.0
    plain: float = 0.0
    idle: float = 0.0
    nodes: int = 0
    expected: float = 0.0
    accepted: int = 0

    @property
    def drafted(self) -> Drafted:
        return Drafted(self.nodes, self.expected, self.accepted)


class StepSums:
    """Sums of steps by row and by the names of the drafters that it asked, since they were last taken.

    The sums of row None are those of all rows for which no drafter was considered.
    """

    def __init__(self, arms: Sequence[Arm]) -> None:
        self.arms = arms
        self.names: dict[tuple[int, ...], str] = {}  # of drafters, in the order in which they were asked
        self.sums: defaultdict[Row | None, dict[str, Sums]] = defaultdict(dict)

    def add(
        self, record: StepRecord, states: Mapping[Row, RowState], extra: float, idle: float
    ) -> tuple[float, float]:
        """Add a step.  Returns the seconds of all its rows, and those of plain decoding.

        extra: seconds of drafts, which fall to the rows that asked for them.  idle: of drafters that were
        not asked, for one row.
        """
        tries, token, sums = record.tries, record.load.token, self.sums
        sizes = [len(step.tree.tokens) for step in record.batch]
        weights = [1 + size if size or r in tries else 0 for r, size in enumerate(sizes)]
        share = extra / (sum(weights) or max(1, record.load.batch))
        everyone = not any(weights)
        all_spent = all_plain = 0.0
        for r, step in enumerate(record.batch):
            if not step.emits:
                continue
            tried = tries.get(r)
            known = weights[r] or step.row in states
            of_row, names = sums[step.row if known else None], self._names(step, tried)
            if names not in of_row:
                of_row[names] = Sums()
            own = of_row[names]
            spent = token + share * (weights[r] or everyone)
            plain = token + record.load.accepted_token * (len(step.emitted) - 1)
            own.steps += 1
            own.spent += spent
            own.plain += plain
            own.idle += idle
            own.nodes += sizes[r]
            own.expected += tried.expected if tried is not None else 0.0
            own.accepted += len(step.accepted)
            all_spent, all_plain = all_spent + spent, all_plain + plain
        return all_spent, all_plain

    def _names(self, step: RowStep, tried: Try | None) -> str:
        if tried is None or not tried.asked:
            return "automatic" if step.tree.tokens else "off"
        asked = tuple(tried.asked)
        if asked not in self.names:
            self.names[asked] = "+".join([self.arms[k].name for k in sorted(asked)])
        return self.names[asked]
