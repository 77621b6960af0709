"""A stream of short answers under the real controller: n-gram look-up, and a draft model that reads prompts.

Costs are those of the built-in draft model beside a target of 100 M weights, on a machine that others use.
"""

from __future__ import annotations

import json
import random
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

from simulated import MAX_DEPTH, SECONDS, Environment, Simulation, Source

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

LOOKUP, MODEL = 0, 1
MOST_TOKENS = 64  # max_tokens of every request
PLAIN, NODE = 4.5, 0.07  # milliseconds, as all that follow: of a plain step, and for a node more
READ, DRAFT_READ = 0.5, 0.03  # for a token of a prompt, by target and draft model
SLOW_READ = 44.0  # more for a whole prompt that the draft model reads while the machine is busy
SLOW_PART, SLOW = 0.3, 1.9  # of the forwards, which take so many times as long
MEAN = 1 + SLOW_PART * (SLOW - 1)


@dataclass
class Answers(Environment):
    """Requests one after another.  ends, prompts: tokens of each answer and prompt.

    rates: acceptance of the draft model in each.  slow: requests whose prompt takes `SLOW_READ` more.
    """

    ends: list[int] = field(default_factory=list)
    prompts: list[int] = field(default_factory=list)
    rates: list[float] = field(default_factory=list)
    slow: Collection[int] = ()

    @staticmethod
    def make(count: int, seed: int, unlucky: int = 0, slow: Collection[int] = ()) -> Answers:
        """unlucky: first requests in which no draft token of the model is right."""
        r = random.Random(seed)
        sources = [Source(0.1, 0.0, 0.3, [0.3], False), Source(0.2, 0.45, 1.0, [0.7], False)]
        rows = [0.0, *(PLAIN + NODE * i for i in range(100))]
        made = Answers(sources, rows, MOST_TOKENS, MOST_TOKENS, 1, True, slow=slow)
        made.luck = [[r.random() for _ in range(MAX_DEPTH + 1)] for _ in range(count * (MOST_TOKENS + 16))]
        made.ends = [r.choice((8, 14, 21, 24, 31, 41, 48, 64)) for _ in range(count)]
        made.prompts = [r.choice((14, 18, 37, 61, 446)) for _ in range(count)]
        made.rates = [0.0 if i < unlucky else r.choice((0.35, 0.5, 0.6, 0.75, 0.95)) for i in range(count)]
        return made

    def accepted(self, k: int, row: int, position: int, depth: int) -> int:
        self.sources[MODEL].levels = [self.rates[row]]
        return super().accepted(k, row, position, depth)

    def seconds(self, depth: int) -> float:
        """Of all requests with drafts of the model of a fixed depth; 0: plain decoding."""
        spent, model = SECONDS * sum(map(self.read, range(len(self.ends)))), self.sources[MODEL]
        for i, end in enumerate(self.ends):
            spent += self.draft_read(i) if depth else 0.0
            at = 1
            while at < end:
                nodes = min(depth, end - at - 1)
                at += 1 + self.accepted(MODEL, i, at, nodes)
                asked = model.fixed + model.per_level * nodes if nodes else 0.0
                spent += SECONDS * (MEAN * self.rows[1 + nodes] + asked)
        return spent

    def read(self, i: int) -> float:
        """Milliseconds of the target for a prompt."""
        return READ * self.prompts[i]

    def draft_read(self, i: int) -> float:
        """Seconds of the draft model for a prompt."""
        return SECONDS * (DRAFT_READ * self.prompts[i] + (SLOW_READ if i in self.slow else 0.0))


class Kept:
    """Memory of a controller, through JSON."""

    def __init__(self) -> None:
        self.text = "null"

    def read(self) -> Any:
        return json.loads(self.text)

    def write(self, value: Any) -> None:
        self.text = json.dumps(value)


class Stream(Simulation):
    """Runs `Answers`.  filled: tokens of each row that the draft model has read.

    noise: seconds that forwards took beyond their mean.
    """

    def __init__(self, env: Answers, memory: Kept | None = None, seed: int = 0) -> None:
        super().__init__(env, seed=seed)
        self.answers, self.filled, self.noise = env, dict[Row, int](), 0.0
        arms = [
            Arm(("lookup",), MAX_DEPTH, lambda depth: depth),
            Arm(("model",), MAX_DEPTH, lambda depth: depth, prefills=True, behind=self._behind),
        ]
        limits = FixedController(Options(), MAX_DEPTH, lambda depth: 2 * depth, 1000)
        forward = ForwardCost({n: SECONDS * env.rows[n] for n in ROWS if n < len(env.rows)})
        settings = Settings(clock=lambda: self.now, seed=seed)
        self.controller = AutoController(limits, Evidence(arms, forward, memory), settings)

    def seconds(self) -> float:
        """Of all requests, with forwards of mean length."""
        for i in range(len(self.answers.ends)):
            self._answer(i)
        self.controller.evidence.save(self.now + 1e3)
        return self.now - self.noise

    def _answer(self, i: int) -> None:
        prompt = self.answers.prompts[i]
        row = make_row([0] * prompt, id=str(i), limit=prompt + MOST_TOKENS)
        self._prefill(row, i)
        while row.finish_reason is None:
            row.computed = len(row.tokens) - 1
            self._step(Batch([RowStep(row, row.computed, 1)]))

    def _prefill(self, row: Row, i: int) -> None:
        batch, propose, forward = (
            Batch([RowStep(row, 0, row.prompt)], prefill=True),
            0.0,
            self.answers.read(i),
        )
        self.controller.budget(batch)
        self.controller.trim(batch)
        if row.drafts_with(("model",)):
            propose, self.filled[row] = self.answers.draft_read(i), row.prompt
        batch[0].emitted, row.tokens, row.steps = [0], [*row.tokens, 0], 1
        self.now += propose + SECONDS * forward
        self.controller.learn(Commit(batch), Times(propose, SECONDS * forward, 0.0))

    def _behind(self, row: Row) -> int:
        return row.computed - self.filled.get(row, 0)

    def _forward(self, usual: float) -> float:
        seconds = usual * (SLOW if self.random.random() < SLOW_PART else 1.0)
        self.noise += seconds - MEAN * usual
        return seconds

    def _draft(self, k: int, batch: Batch) -> Draft:
        """With what the draft model has to read first."""
        for row in [step.row for step in batch if k == MODEL and step.budget.depth]:
            self.now += SECONDS * DRAFT_READ * self._behind(row)
            self.filled[row] = row.computed
        return super()._draft(k, batch)

    def _emit(self, step: RowStep) -> int:
        """End the answer where it ends, long before `max_tokens`."""
        row = step.row
        emitted = super()._emit(step)
        if (surplus := len(row.tokens) - row.prompt - self.answers.ends[int(row.id)]) >= 0:
            row.finish_reason, emitted = "stop", emitted - surplus
            row.tokens = row.tokens[: len(row.tokens) - surplus]
            step.emitted, step.accepted = step.emitted[:emitted], step.accepted[:emitted]
        return emitted
