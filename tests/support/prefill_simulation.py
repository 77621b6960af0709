"""An engine without a model, for tests of prefill pacing: real pacer and scheduler on a simulated clock."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from outrider.cache.pages import Cache
from outrider.control.prefill import PrefillPacer
from outrider.core.step import Batch
from outrider.core.tree import Budget, DraftTree
from outrider.engine.scheduler import Hooks, Limits, Scheduler
from outrider.testing import make_row


@dataclass(frozen=True)
class Costs:
    """Seconds of a step.  `decode` is for 8 rows; `overhead` of it do not depend on how many there are."""

    decode: float = 0.013
    overhead: float = 0.5
    token: float = 0.0007
    growth: float = 0.0003  # more per token and 1,000 positions before it
    fixed: float = 0.0  # of a chunk beside decoding rows
    noise: float = 0.0
    spikes: float = 0.0  # probability of a step that takes five times as long

    def of(self, batch: Batch, rng: random.Random) -> float:
        """Seconds of the step."""
        seconds = chunks = decoding = 0.0
        for step in batch:
            if step.known == 1 and step.emits:
                decoding += 1
            else:
                chunks += 1
                context = step.start + step.known / 2
                seconds += step.known * (self.token + self.growth * context / 1000)
        seconds += self.fixed if chunks else 0.0
        seconds += self.decode * (self.overhead + (1 - self.overhead) * decoding / 8)
        noisy = seconds * rng.lognormvariate(0, self.noise) if self.noise else seconds
        return noisy * (5 if rng.random() < self.spikes else 1)


@dataclass
class Simulation:
    """An engine without a model: steps advance `clock` by `costs`.

    Decoding rows emit one token each, and of six draft tokens those accepted with probability `acceptance`.
    """

    costs: Costs
    slowdown: float | None = None
    tokens: int = 512
    seats: int = 16
    seed: int = 0
    speed: float = 1.0  # of the machine: multiplies every step
    acceptance: float = 0.0
    clock: float = 0.0
    began: float = 0.0
    gaps: list[float] = field(default_factory=list)  # seconds of steps with decoding rows and a chunk
    first: dict[str, float] = field(default_factory=dict)  # id -> clock at the first token

    def __post_init__(self) -> None:
        self.rng = random.Random(self.seed)
        self.pacer = PrefillPacer(self.tokens, self.slowdown)
        cache = Cache(40_000, 200_000, False)
        cache.pools = []
        limits = Limits(self.seats, self.tokens)
        self.scheduler = Scheduler(cache, limits, Hooks(prefill=self.pacer.budget))

    def add(self, name: str, prompt: int, new: int = 1) -> None:
        self.scheduler.add(make_row([1] * prompt, id=name, limit=prompt + new))

    def step(self) -> Batch:
        batch = self.scheduler.next()
        known = sum(step.known for step in batch)
        assert 0 < known <= self.tokens
        drafts = Budget(6, 6) if self.acceptance else Budget()
        self.scheduler.reserve(
            batch, [drafts if step.known == 1 and step.emits else Budget() for step in batch]
        )
        for step in batch:
            step.tree = DraftTree.chain([1] * step.budget.nodes, [0.5] * step.budget.nodes)
            step.accepted = range(self._accepted(step.budget.nodes))
            step.emitted = [1] * (1 + len(step.accepted)) if step.emits else []
        seconds = self.costs.of(batch, self.rng) * self.speed
        self.clock += seconds
        self.scheduler.clip(batch)
        self.scheduler.commit(batch)
        self.pacer.learn(batch, seconds)
        decoding = sum(step.known == 1 and step.emits for step in batch)
        if decoding and known > decoding:
            self.gaps.append(seconds)
        for step in batch:
            row = step.row
            if step.emitted:
                self.first.setdefault(row.id, self.clock)
            if row.finish_reason is not None:
                self.scheduler.retire(row)
        return batch

    def _accepted(self, drafted: int) -> int:
        return next((i for i in range(drafted) if self.rng.random() >= self.acceptance), drafted)

    def until(self, *names: str) -> float:
        """Seconds until all of these have their first token."""
        began = self.clock
        while any(name not in self.first for name in names):
            self.step()
        return self.clock - began
