"""A closed loop of clients on a simulated clock: the real scheduler, pacer and controller, no model.

Costs are those of the built-in draft model beside a target of 100 M weights.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from outrider.cache.pages import Cache
from outrider.control.auto import AutoController
from outrider.control.cost import ROWS, ForwardCost
from outrider.control.evidence import Evidence
from outrider.control.fixed import FixedController, Options
from outrider.control.plan import Arm
from outrider.control.planner import Settings
from outrider.control.prefill import PrefillPacer
from outrider.core.clock import Times
from outrider.core.row import Row
from outrider.core.step import Batch, Commit, RowStep
from outrider.core.tree import EMPTY_TREE, NO_BUDGET, Draft, DraftTree
from outrider.engine.scheduler import Hooks, Limits, Scheduler
from outrider.testing.rows import make_row

DEPTH = 8
METHOD = ("model",)


@dataclass(frozen=True)
class Costs:
    """Milliseconds of the parts of a step.

    step: of a forward, more by `row` for each of its rows.  read: of a prompt token.
    level: of a level of drafts, more by `level_row` for each row.  draft_read: of a prompt token, by the
    draft model.
    """

    step: float = 6.0
    row: float = 0.45
    read: float = 0.3
    level: float = 0.3
    level_row: float = 0.02
    draft_read: float = 0.03

    def forward(self, rows: int, read: int) -> float:
        return self.step + self.row * rows + self.read * read


@dataclass
class ClosedLoop:
    """Requests of `clients`, each of which sends its next one when the one before has ended.

    acceptance: probability that the next draft token is right; None: plain decoding.
    prompts, answers: least and most tokens.  first: request -> seconds to its first token.
    emitted, seconds: tokens and time until the last request is sent.
    """

    acceptance: float | None
    costs: Costs = Costs()
    prompts: tuple[int, int] = (70, 150)
    answers: tuple[int, int] = (32, 96)
    clients: int = 64
    requests: int = 300
    tokens: int = 512
    now: float = 0.0
    first: dict[str, float] = field(default_factory=dict)
    emitted: int = 0
    seconds: float = 0.0

    def __post_init__(self) -> None:
        self.sent, self.came = 0, dict[str, float]()
        self.filled: dict[Row, int] = {}  # tokens that the draft model has read
        arm = Arm(METHOD, DEPTH, lambda depth: depth, prefills=True, behind=self._behind)
        limits = FixedController(Options(), DEPTH, lambda depth: depth, 1000)
        measured = {n: 1e-3 * self.costs.forward(n, 0) for n in ROWS}
        self.auto = AutoController(
            limits, Evidence([arm], ForwardCost(measured)), Settings(clock=lambda: self.now)
        )
        self.pacer = PrefillPacer(self.tokens)
        cache = Cache(40_000, 200_000, False)
        cache.pools = []
        hooks = Hooks(prefill=self.pacer.budget)
        if self.acceptance is not None:
            hooks.draft_nodes = self.auto.likely
        self.scheduler = Scheduler(cache, Limits(self.clients, self.tokens), hooks)

    def run(self) -> ClosedLoop:
        for _ in range(self.clients):
            self._send()
        while self.scheduler.running or self.scheduler.waiting:
            self._step()
        return self

    @property
    def rate(self) -> float:
        """Tokens a second."""
        return self.emitted / self.seconds

    def _send(self) -> None:
        if self.sent == self.requests:
            return
        own = random.Random(self.sent)
        prompt, answer = own.randint(*self.prompts), own.randint(*self.answers)
        row = make_row([1] * prompt, id=str(self.sent), limit=prompt + answer)
        self.sent, self.came[row.id] = self.sent + 1, self.now
        self.scheduler.add(row)

    def _behind(self, row: Row) -> int:
        return max(0, row.computed - self.filled.get(row, 0))

    def _step(self) -> None:
        batch, began = self.scheduler.next(), self.now
        budgets = [NO_BUDGET] * len(batch) if self.acceptance is None else self.auto.budget(batch)
        self.scheduler.reserve(batch, budgets)
        if self.acceptance is not None:
            batch.take(self._draft(batch))
            self.auto.trim(batch)
        propose = self.now - began
        nodes = sum(len(step.tree.tokens) for step in batch)
        decoding = sum(step.known == 1 and step.emits for step in batch)
        read = sum(step.known for step in batch) - decoding
        forward = 1e-3 * self.costs.forward(decoding + nodes, read)
        self.now += forward
        for step in batch:
            self._emit(step)
        self.scheduler.clip(batch)
        self.scheduler.commit(batch)
        for step in batch:
            step.row.steps += bool(step.emitted)
            if step.emitted:
                self.first.setdefault(step.row.id, self.now - self.came[step.row.id])
        self._end(batch, Times(propose, forward, 0.0))

    def _end(self, batch: Batch, times: Times) -> None:
        ended = [step.row for step in batch if step.row.finish_reason is not None]
        for row in ended:
            self.scheduler.retire(row)
            self.filled.pop(row, None)
        if self.acceptance is not None:
            self.auto.learn(Commit(batch), times)
        self.pacer.learn(batch, sum(times))
        if self.sent < self.requests:
            self.emitted += sum(len(step.emitted) for step in batch)
            self.seconds = self.now
        for _ in ended:
            self._send()

    def _draft(self, batch: Batch) -> Draft:
        """Chains, after the prompts and texts that the draft model has to read."""
        trees, deepest, asking = [], 0, 0
        for step in batch:
            row, depth = step.row, step.budget.depth
            reads = depth or (step.known > 1 and row.drafts_with(METHOD))
            if reads:
                unread = step.end - self.filled.get(row, 0)
                self.filled[row] = step.end
                self.now += 1e-3 * self.costs.draft_read * max(0, unread - 1)
            asking, deepest = asking + bool(depth), max(deepest, depth)
            trees.append(DraftTree.chain([2] * depth, [0.7] * depth) if depth else EMPTY_TREE)
        self.now += 1e-3 * deepest * (self.costs.level + self.costs.level_row * asking)
        return Draft(trees)

    def _emit(self, step: RowStep) -> None:
        right, luck = 0, random.Random(f"{step.row.id} {len(step.row.tokens)}")
        while right < step.tree.size and luck.random() < (self.acceptance or 0.0):
            right += 1
        step.accepted = [*range(right)] if step.emits else []
        step.emitted = [2] * (right + 1) if step.emits else []
