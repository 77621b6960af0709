"""A stream of requests in a large batch, beside drafters whose cost hardly depends on the rows that ask.

Costs are those of a device, in plain steps: a draft for one row takes nearly as long as one for all.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

from simulated import MAX_DEPTH, SECONDS, Environment, Outcome, Simulation, Source

from outrider.control.auto import AutoController
from outrider.control.cost import ROWS, ForwardCost
from outrider.control.evidence import Evidence
from outrider.control.fixed import FixedController, Options
from outrider.control.plan import Arm
from outrider.control.planner import Settings
from outrider.core.clock import Times
from outrider.core.row import Row
from outrider.core.step import Batch, Commit, RowStep
from outrider.core.tree import Draft
from outrider.testing.rows import make_row

LONGEST = 128  # tokens of an answer
NODE = 0.003  # plain steps that a further row of a forward takes
STEP = 5.0  # milliseconds of a plain step of one request


@dataclass
class Crowd(Environment):
    """`batch` requests at once, of which the next begins where one ends.

    ends: tokens of each answer.  prompt: tokens of each prompt.  bias: more or less acceptance of each one.
    beside: plain steps that each request takes beside a forward.
    per_row: plain steps that each row adds to a draft, by drafter.
    """

    ends: list[int] = field(default_factory=list)
    prompt: int = 16
    per_row: list[float] = field(default_factory=list)
    bias: list[float] = field(default_factory=list)
    beside: float = 0.0

    def accepted(self, k: int, row: int, position: int, depth: int) -> int:
        probability = self.acceptance(k, position) + self.bias[row]
        for i, luck in enumerate(self.luck[row * self.tokens + position][:depth]):
            if luck >= probability:
                return i
        return depth

    @staticmethod
    def make(
        sources: list[Source],
        per_row: list[float],
        batch: int,
        count: int,
        seed: int,
        node: float = NODE,
        spread: float = 0.0,
    ) -> Crowd:
        r = random.Random(seed)
        rows = [0.0, *(STEP * (1 + node * i) for i in range(40 * batch))]
        ends = [r.randint(60, 100) for _ in range(count)]
        made = Crowd(sources, rows, LONGEST, LONGEST, batch, True, ends=ends, per_row=per_row)
        made.luck = [[r.random() for _ in range(MAX_DEPTH + 1)] for _ in range(count * (LONGEST + MAX_DEPTH))]
        made.bias = [r.uniform(-spread, spread) for _ in range(count)]
        return made

    def plain_time(self, requests: Sequence[int]) -> float:
        """Plain steps until all of these have ended that begin together."""
        ends = [self.ends[i] for i in requests]
        running = (sum(end >= n for end in ends) for n in range(2, max(ends) + 1))
        first = self.rows[len(ends) * self.prompt] + self.beside * len(ends)
        return first + sum(self.rows[count] + self.beside * count for count in running)


class Stream(Simulation):
    """Runs a `Crowd`, by default under the adaptive controller.

    lost: milliseconds beyond plain decoding of the same tokens.  worst: largest loss beyond 1 %.
    asked: drafter -> rows that asked it, by step.
    """

    def __init__(self, env: Crowd, seed: int = 0, depth: int | None = None) -> None:
        super().__init__(env, seed=seed)
        self.crowd, self.asked = env, list[tuple[int, int, int]]()
        arms = [Arm((f"drafter{k}",), MAX_DEPTH, lambda depth: depth) for k in range(len(env.sources))]
        limits = FixedController(Options(), MAX_DEPTH, lambda depth: len(arms) * depth, 1000)
        forward = ForwardCost({n: SECONDS * env.rows[n] for n in ROWS if n < len(env.rows)})
        settings = Settings(clock=lambda: self.now, seed=seed)
        self.controller = AutoController(limits, Evidence(arms, forward), settings)
        if depth is not None:
            self.controller = FixedController(Options(), depth, lambda depth: depth, 1000)  # type: ignore

    def run(self) -> Outcome:
        env, waiting, rows = self.crowd, list(range(len(self.crowd.ends))), list[Row]()
        time = plain = worst = 0.0
        while waiting or rows:
            while waiting and len(rows) < env.batch:
                rows.append(make_row([0] * env.prompt, id=str(waiting.pop(0)), limit=env.prompt + LONGEST))
            steps = [RowStep(row, row.computed, len(row.tokens) - row.computed) for row in rows]
            batch = Batch(steps, prefill=any(step.known > 1 for step in steps))
            seconds, emitted = self._step(batch)
            time += seconds / SECONDS
            decode = env.rows[len(rows)]
            plain += env.rows[sum(step.known for step in steps)] + decode * (emitted / len(rows) - 1)
            worst = max(worst, time - 1.01 * plain)
            for row in rows:
                row.computed = len(row.tokens) - 1
            rows = [row for row in rows if row.finish_reason is None]
        return Outcome(time, plain, worst, self.controller)

    def run_apart(self) -> list[float]:
        """Run one batch after another.  Returns their times over those of plain decoding."""
        env, found = self.crowd, list[float]()
        for first in range(0, len(env.ends), env.batch):
            requests, began = range(first, first + env.batch), self.now
            rows = [make_row([0] * env.prompt, id=str(i), limit=env.prompt + LONGEST) for i in requests]
            while rows:
                steps = [RowStep(row, row.computed, len(row.tokens) - row.computed) for row in rows]
                self._step(Batch(steps, prefill=steps[0].known > 1))
                for row in rows:
                    row.computed = len(row.tokens) - 1
                rows = [row for row in rows if row.finish_reason is None]
            found.append((self.now - began) / SECONDS / env.plain_time(requests))
        return found

    def _step(self, batch: Batch) -> tuple[float, int]:
        env, controller, began = self.crowd, self.controller, self.now
        for step, budget in zip(batch, controller.budget(batch)):
            step.budget = budget
        self._propose(batch)
        controller.trim(batch)
        propose = self.now - began
        rows = sum(step.known + len(step.tree.tokens) for step in batch)
        forward = SECONDS * (env.rows[rows] + env.beside * len(batch))
        emitted = sum(map(self._emit, batch))
        self.now += forward
        controller.learn(Commit(batch), Times(propose, forward, 0.0))
        return propose + forward, emitted

    def _draft(self, k: int, batch: Batch) -> Draft:
        count = sum(step.budget.depth > 0 for step in batch)
        self.now += SECONDS * self.crowd.per_row[k] * count
        if count:
            self.asked.append((k, count, max(step.budget.depth for step in batch)))
        return super()._draft(k, batch)

    def _emit(self, step: RowStep) -> int:
        row, emitted = step.row, super()._emit(step)
        if (surplus := len(row.tokens) - row.prompt - self.crowd.ends[int(row.id)]) >= 0:
            row.finish_reason, emitted = "stop", emitted - surplus
            row.tokens = row.tokens[: len(row.tokens) - surplus]
            step.emitted, step.accepted = step.emitted[:emitted], step.accepted[: emitted - 1]
        return emitted
