"""Environments for the adaptive controller without a model and without a clock.

Costs are in plain steps.  Acceptance of each drafter is drawn at random, moves, or sets a trap.  The real
controller decides; the real `DraftTree`s, budgets and commits carry its decisions.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

from outrider.control.auto import AutoController
from outrider.control.cost import ROWS, ForwardCost
from outrider.control.evidence import Evidence
from outrider.control.fixed import FixedController, Options
from outrider.control.ledger import Grace
from outrider.control.plan import Arm
from outrider.control.planner import Settings
from outrider.core.clock import Times
from outrider.core.step import Batch, Commit, RowStep
from outrider.core.tree import EMPTY_TREE, Draft, DraftTree
from outrider.testing.rows import make_row

MAX_DEPTH = 8
SECONDS = 0.001  # of a plain step of one request


@dataclass
class Source:
    """A simulated drafter.

    fixed, per_level: plain steps that an ask costs.  hit: share of positions where it proposes anything.
    levels: acceptance of a token by phase of the text.  informative: whether its
    confidence predicts the acceptance.
    """

    fixed: float
    per_level: float
    hit: float
    levels: list[float]
    informative: bool


@dataclass
class Environment:
    """Texts of `batch` requests, with the drafters' luck at every position fixed in advance.

    rows[n]: plain steps of a forward over n rows.  period: tokens of a phase.
    """

    sources: list[Source]
    rows: list[float]
    period: int
    tokens: int
    batch: int
    measured: bool
    luck: list[list[float]] = field(default_factory=list)  # [position of all requests][depth]
    noise: float = 0.0

    @staticmethod
    def draw(seed: int, tokens: int = 1500) -> Environment:
        """Costs, drafters and their acceptance at random; one environment in four is a trap."""
        r = random.Random(seed)
        batch = r.choice((1, 1, 1, 2, 4))
        slope, knee = r.uniform(0.01, 0.25), r.choice((1, 4, 8, 100))
        rows = [0.0, 1.0]
        while len(rows) < 80:
            rows.append(rows[-1] + (slope if len(rows) < knee else 2 * slope))
        tokens = tokens // batch
        period = r.randint(60, 800)
        phases = tokens // period + 2
        trap = r.random() < 0.25
        sources = []
        for _ in range(r.randint(1, 3)):
            levels = [r.betavariate(1.2, 1.2) for _ in range(phases)]
            if trap:
                levels = [0.9 if i % 2 == 0 else 0.02 for i in range(phases)]
            lookup = r.random() < 0.4
            fixed, per_level = (r.uniform(0.002, 0.02), 0.0) if lookup else (0.0, r.uniform(0.0, 0.15))
            sources.append(Source(fixed, per_level, r.uniform(0.2, 1.0) if lookup else 1.0, levels, lookup))
        made = Environment(sources, rows, period, tokens, batch, r.random() < 0.8)
        count = batch * (tokens + MAX_DEPTH)
        made.luck = [[r.random() for _ in range(MAX_DEPTH + 1)] for _ in range(count)]
        made.noise = r.choice((0.0, 0.0, 0.03))
        return made

    def acceptance(self, k: int, position: int) -> float:
        levels = self.sources[k].levels
        return levels[min(position // self.period, len(levels) - 1)]

    def proposes(self, k: int, row: int, position: int) -> bool:
        return self.luck[row * self.tokens + position][MAX_DEPTH] < self.sources[k].hit

    def accepted(self, k: int, row: int, position: int, depth: int) -> int:
        """Tokens of a draft of this depth that are right."""
        probability, luck = self.acceptance(k, position), self.luck[row * self.tokens + position]
        for i in range(depth):
            if luck[i] >= probability:
                return i
        return depth

    def fixed_time(self, k: int, depth: int) -> float:
        """Plain steps that always drafting with one drafter and depth would take; depth 0 is plain."""
        source, time = self.sources[k], 0.0
        at = [0] * self.batch
        while any(place < self.tokens for place in at):
            open_rows = [r for r in range(self.batch) if at[r] < self.tokens]
            nodes = 0
            for r in open_rows:
                drafts = depth and self.proposes(k, r, at[r])
                nodes += depth if drafts else 0
                at[r] += 1 + (self.accepted(k, r, at[r], depth) if drafts else 0)
            time += self.rows[len(open_rows) + nodes]
            time += source.fixed + source.per_level * depth if depth else 0.0
        return time


@dataclass
class Outcome:
    """Plain steps: of the controlled run, of plain decoding, and the largest loss beyond 1 % on the way."""

    time: float
    plain: float
    worst_loss: float
    controller: AutoController


class Simulation:
    """Runs the requests of an environment under an AutoController."""

    def __init__(
        self, env: Environment, grace_steps: float = 20.0, seed: int = 0, settles: bool = False
    ) -> None:
        self.env, self.now, self.random = env, 0.0, random.Random(seed)
        arms = [Arm((f"drafter{k}",), MAX_DEPTH, lambda depth: depth) for k in range(len(env.sources))]
        limits = FixedController(Options(), MAX_DEPTH, lambda depth: len(arms) * depth, 1000)
        measured = {
            n: SECONDS * env.rows[n] * self.random.uniform(0.95, 1.05) for n in ROWS if n < len(env.rows)
        }
        forward = ForwardCost(measured if env.measured else None)
        settings = Settings(Grace(grace_steps, grace_steps, 0.0), lambda: self.now, seed)
        self.controller = AutoController(limits, Evidence(arms, forward), settings)
        self.controller.settles = settles

    def run(self) -> Outcome:
        env, worst = self.env, 0.0
        rows = [make_row([0] * 4, id=str(r), limit=4 + env.tokens) for r in range(env.batch)]
        time = plain = 0.0
        while rows:
            batch = Batch([RowStep(row, len(row.tokens) - 1, 1) for row in rows])
            seconds, emitted = self._step(batch)
            time += seconds / SECONDS
            plain += emitted * env.rows[len(rows)] / len(rows)
            worst = max(worst, (time - 1.01 * plain) / env.rows[env.batch])
            rows = [row for row in rows if row.finish_reason is None]
        return Outcome(time, plain, worst, self.controller)

    def _step(self, batch: Batch) -> tuple[float, int]:
        env, controller, began = self.env, self.controller, self.now
        for step, budget in zip(batch, controller.budget(batch)):
            step.budget = budget
        self._propose(batch)
        controller.trim(batch)
        if controller.settles:  # as on a device, while it computes
            controller.settle()
        propose = self.now - began
        nodes = sum(len(step.tree.tokens) for step in batch)
        forward = self._forward(SECONDS * env.rows[len(batch) + nodes])
        emitted = sum(map(self._emit, batch))
        self.now += forward
        controller.learn(Commit(batch), Times(propose, forward, 0.0))
        return propose + forward, emitted

    def _forward(self, usual: float) -> float:
        """Seconds of a forward that usually takes so many."""
        return usual * (1 + self.env.noise * self.random.gauss(0, 1))

    def _propose(self, batch: Batch) -> None:
        mix_budgets = batch.mix_budgets
        if mix_budgets is None:
            batch.take(self._draft(0, batch))
            return
        drafts: dict[int, Draft] = {}
        for k in mix_budgets.order:
            drafts[k] = self._draft(k, batch.within(mix_budgets.budgets_of(k, batch, drafts)))
        for r, step in enumerate(batch):
            step.tree = _merged([drafts[k].trees[r] for k in range(len(self.env.sources))])

    def _draft(self, k: int, batch: Batch) -> Draft:
        """Trees of drafter k: tokens are numbered by drafter, so that no two drafters agree."""
        source, trees, deepest = self.env.sources[k], [], 0
        for step in batch:
            depth, row, position = step.budget.depth, int(step.row.id), len(step.row.tokens) - step.row.prompt
            deepest = max(deepest, depth)
            if not depth or not self.env.proposes(k, row, position):
                trees.append(EMPTY_TREE)
                continue
            confidence = self.env.acceptance(k, position) if source.informative else 0.7
            trees.append(DraftTree.chain([k] * depth, [min(0.99, max(0.01, confidence))] * depth))
        if deepest:
            self.now += SECONDS * (source.fixed + source.per_level * deepest)
        return Draft(trees)

    def _emit(self, step: RowStep) -> int:
        """Accept the longest right chain among the drafters, and one token more."""
        row, tree, best = step.row, step.tree, list[int]()
        position = len(row.tokens) - row.prompt
        for k in range(len(self.env.sources)):
            nodes = [i for i, token in enumerate(tree.tokens) if token == k]
            right = self.env.accepted(k, int(row.id), position, len(nodes))
            best = max(best, nodes[:right], key=len)
        emitted = min(len(best) + 1, row.limit - len(row.tokens))
        step.accepted, step.emitted = best[: emitted - 1], [0] * emitted
        row.tokens += step.emitted
        row.steps += 1
        if len(row.tokens) >= row.limit:
            row.finish_reason = "length"
        return emitted


def _merged(trees: Sequence[DraftTree]) -> DraftTree:
    tokens: list[int] = []
    parents: list[int] = []
    confidence: list[float] = []
    proposers: list[int] = []
    for k, tree in enumerate(trees):
        first = len(tokens)
        parents += [parent + first if parent >= 0 else parent for parent in tree.parents]
        tokens += tree.tokens
        confidence += tree.confidence
        proposers += [1 << k] * len(tree.tokens)
    return DraftTree(tokens, parents, confidence, proposers=proposers)
