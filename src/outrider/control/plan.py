"""Records of the adaptive controller."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from outrider.control.choose import Option
from outrider.control.cost import Ask, ForwardCost
from outrider.control.ledger import EXPLORE, SHARE, allowance
from outrider.control.row_state import RowState
from outrider.control.tail import Tail
from outrider.core.row import Row
from outrider.core.step import Batch
from outrider.core.tree import Budget


class Arm(NamedTuple):
    """A drafter as the controller sees it: its methods, its largest depth, and the nodes of a depth.

    prefills: it computes prompts, which costs time, and skips those of rows that leave it out.
    behind: row -> tokens that it has to compute before it drafts for it.
    grade: row -> how much speaks for its next draft, before it is asked for; 0 if that is unknown.
    stops: it ends a draft at the floor of its budget, so that it is asked for as much as is allowed.
    grades: it has grades.
    """

    sources: Sequence[str]
    depth: int
    size: Callable[[int], int]
    prefills: bool = False
    behind: Callable[[Row], int] = lambda row: 0
    grade: Callable[[Row], int] = lambda row: 0
    stops: bool = False
    grades: bool = False

    @property
    def name(self) -> str:
        return "/".join(self.sources)


class Plan(NamedTuple):
    """Options of one row for the next steps, cheapest drafter first.

    exploring: drafters that do not seem to pay.  budget: for all options together.
    floors: drafter -> that of its budget.  loss: seconds that a step of it may lose.
    late: some drafter lacks many tokens of the row.  sure: they pay even by a cautious estimate.
    tests: a node is verified in any case, since little is known of such drafts.
    """

    state: RowState
    options: list[Option]
    exploring: set[int]
    budget: Budget
    floors: Mapping[int, float]
    loss: float
    late: bool = False
    sure: bool = False
    tests: bool = False

    def option(self, drafter: int) -> Option:
        return next(option for option in self.options if option.drafter == drafter)


@dataclass(slots=True)
class Try:
    """Drafts for one row in one step.

    asked: drafter -> depth that it was asked for.  proposed: drafter -> depth of its tree.
    gains: drafter of a mix -> expected accepted tokens of its draft beside those of the cheaper ones.
    ended: drafters whose tree ended at the floor.
    late: drafter -> tokens of the text that it lacked and, after `catch_up`, has computed in this step.
    expected: accepted tokens of the verified nodes.
    """

    plan: Plan
    asked: dict[int, int] = field(default_factory=dict)
    proposed: dict[int, int] = field(default_factory=dict)
    gains: dict[int, float] = field(default_factory=dict)
    ended: set[int] = field(default_factory=set)
    late: dict[int, int] = field(default_factory=dict)
    expected: float = 0.0

    @property
    def planned(self) -> float:
        """Accepted tokens that the plan expects of the drafters that were asked."""
        options = [option for option in self.plan.options if option.drafter in self.asked]
        return sum([self.gains.get(option.drafter, option.gain) for option in options])

    def catch_up(self, row: Row, arms: Sequence[Arm]) -> None:
        """After drafting: a drafter that lacks tokens, or had no room for the row, could propose nothing."""
        lacks = {k: arms[k].behind(row) for k in (*self.asked, *self.late) if arms[k].prefills}
        self.late = {k: tokens - lacks[k] for k, tokens in self.late.items()}
        self.asked = {k: depth for k, depth in self.asked.items() if not lacks.get(k)}


FEW = 4  # nodes that may always be tried
PREFILL_DELAY = 1.0  # of a step with prompt tokens: draft nodes may lengthen it by so much
FIRST_COSTS = 64  # numbers of draft nodes whose costs are computed together, at least
MOST_NODES = 1024  # that are considered for it


@dataclass(slots=True)
class Load:
    """A step without its drafts: emitting rows, rows of the forward, positions they attend to, seconds.

    decode: seconds of a step without the tokens of prompts and resumed texts, which have to be computed in
    any case: what one more token of every row is worth.
    max_added: seconds that draft nodes may add.  Those beside prompt tokens delay the prompt's first token.
    max_nodes: `nodes`, once it was asked for.
    verified: seconds of draft nodes, as far as they were asked for.  costs: of none, one, two, …
    """

    forward: ForwardCost
    batch: int = 1
    rows: int = 1
    context: int = 0
    pace: float = 1.0
    node_pace: float = 1.0  # the same for rows beyond one a request
    delay_factor: float = 1.0  # of seconds that drafts add, by the requests that they delay
    plain: float = 0.0
    decode: float = 0.0
    rate: float = 0.0  # tokens per second that drafts have to beat
    token_value: float = 1.0  # part of `token` that an accepted token is worth
    allowance: float = 1.0  # part of the usual losses that it may have
    base: float = 0.0  # seconds of the rows at pace 1, without context
    max_added: float = math.inf
    max_nodes: float = 0.0
    verified: dict[int, float] = field(default_factory=dict)
    costs: list[float] = field(default_factory=list)

    @staticmethod
    def of(batch: Batch, forward: ForwardCost, tail: Tail | None = None) -> Load:
        emitting = rows = context = read = 0
        for step in batch:
            known, end = step.known, step.start + step.known
            rows += known
            context += known * end
            if step.emits:
                emitting += 1
                read += end
        load = Load._of_rows(forward, tail, emitting, rows, context, read)
        load.rate = max(load.rate, forward.rate(emitting) / load.token_value)
        if rows > emitting:
            load.max_added = PREFILL_DELAY * load.plain
            load.delay_factor = (len(batch) + batch.waiting) / max(1, emitting)
        return load

    @staticmethod
    def plain_step(forward: ForwardCost, rows: int, tail: Tail | None = None) -> Load:
        """A step in which so many rows decode, with short contexts."""
        return Load._of_rows(forward, tail, rows, rows, 0, 0)

    @staticmethod
    def _of_rows(
        forward: ForwardCost, tail: Tail | None, emitting: int, rows: int, context: int, read: int
    ) -> Load:
        """A step by the measured costs.  context, read: positions for all rows, for the emitting ones."""
        pace, decoding = forward.pace(emitting), forward.base(emitting, read)
        added, decode = pace * forward.further_row(emitting), pace * decoding
        token_value = 1.0 if tail is None else tail.token_value(emitting, forward)
        return Load(
            forward,
            batch=emitting,
            rows=rows,
            context=context,
            pace=pace,
            node_pace=added,
            plain=decode + added * (forward.base(rows, context) - decoding),
            decode=decode,
            rate=emitting / decode / token_value if emitting else 0.0,
            token_value=token_value,
            allowance=allowance(emitting, forward.growing(emitting)),
            base=forward.base(rows),
        )

    @property
    def decodes_only(self) -> bool:
        """Whether every row computes one token and emits the next."""
        return self.rows == self.batch

    @property
    def token(self) -> float:
        """Seconds that plain decoding takes for a token of a row."""
        return self.decode / max(1, self.batch)

    @property
    def accepted_token(self) -> float:
        """Seconds that an accepted token saves."""
        return self.token_value * self.token

    @property
    def loss_share(self) -> float:
        """Part of its time that may be lost."""
        return SHARE * self.allowance

    @property
    def explore(self) -> float:
        """Part of its time for each drafter that does not seem to pay."""
        return EXPLORE * self.allowance

    @property
    def nodes(self) -> float:
        """The most draft nodes that may be added, at least one."""
        if not self.max_nodes:
            self.max_nodes = math.inf
            if self.max_added < math.inf:
                self.max_nodes = max(1, bisect_right(range(1, MOST_NODES), self.max_added, key=self.added))
        return self.max_nodes

    def verify(self, nodes: int) -> float:
        """Seconds that so many draft nodes add to the forward; infinite where that is unknown or too many."""
        found = self.verified.get(nodes)
        if found is None:
            unknown = nodes > max(FEW, self.rows) and self.rows + nodes > self.forward.trusted
            added = math.inf if unknown else self.added(nodes)
            self.verified[nodes] = found = self.delay_factor * added if added <= self.max_added else math.inf
        return found

    def costs_of(self, most: int) -> Sequence[float]:
        """`verify` of every number of draft nodes from 0 to at least `most`."""
        if len(self.costs) <= most:
            forward, rows = self.forward, self.rows
            each = forward.per_context * self.context / max(1, rows)
            known = max(FEW, rows, forward.trusted - rows)
            bases = forward.bases(rows, max(FIRST_COSTS, 2 * most))
            added = [self.node_pace * (base + each * n - self.base) for n, base in enumerate(bases)]
            factor, limit = self.delay_factor, self.max_added
            costs = [factor * cost if cost <= limit else math.inf for cost in added[: known + 1]]
            self.costs = costs + [math.inf] * (len(added) - len(costs))
        return self.costs

    def added(self, nodes: int) -> float:
        """The same, extrapolated where it cannot be told."""
        forward, rows = self.forward, self.rows
        context = nodes * self.context // rows if rows else 0
        return self.node_pace * (forward.base(rows + nodes, context) - self.base)


@dataclass(slots=True)
class StepRecord:
    """One step, to be learned from.

    tries: row of the batch -> its drafts.  propose, seconds: of drafting, and of everything else.
    spent: seconds of each drafter of a mix.  last: some row ended in it.
    once: seconds of one-time work besides, such as recording a graph.
    cold: the first one with drafts after a rest: their code and data have left the processor's caches.
    """

    batch: Batch
    load: Load
    tries: dict[int, Try]
    propose: float
    seconds: float
    spent: dict[int, float]
    last: bool
    once: float = 0.0
    cold: bool = False

    def lost(self, usual: float) -> float:
        """Seconds that one-time work for drafts, which usually cost `usual`, has added to the step."""
        added = self.propose + self.seconds + self.once - self.load.plain - usual
        return max(0.0, min(added, self.once)) if self.tries else 0.0

    @property
    def usual(self) -> bool:
        """Whether its cost tells that of later steps: it is not the first, and not only of trials."""
        return not self.cold and any(not tried.plan.exploring for tried in self.tries.values())

    @property
    def nodes(self) -> int:
        return sum([len(step.tree.tokens) for step in self.batch])

    @property
    def emitted(self) -> int:
        return sum([len(step.emitted) for step in self.batch])

    @property
    def asks(self) -> dict[int, Ask]:
        """Drafter -> its asks.  The depth of one that ended at the floor is that of the levels it drafted."""
        levels: dict[int, list[int]] = {}
        for tried in self.tries.values():
            for k, depth in tried.asked.items():
                levels.setdefault(k, []).append(tried.proposed[k] if k in tried.ended else depth)
        return {k: Ask(len(own), sum(own) / len(own)) for k, own in levels.items()}

    @property
    def late(self) -> Counter[int]:
        """Drafter -> tokens of texts that it has caught up with."""
        late = Counter[int]()
        for tried in self.tries.values():
            for k, tokens in tried.late.items() if tried.late else ():
                if tokens > 0:
                    late[k] += tokens
        return late
