"""Controllers and pacers whose steps take modelled seconds: what they choose depends on no machine."""

from __future__ import annotations

import itertools

from outrider.control.auto import AutoController
from outrider.control.cost import ForwardCost
from outrider.control.evidence import Evidence
from outrider.control.fixed import FixedController
from outrider.control.planner import Settings
from outrider.control.prefill import PrefillPacer
from outrider.core.clock import Times
from outrider.core.step import Batch, Commit
from outrider.engine import adaptive, engine

FORWARD, FURTHER_ROW = 1e-3, 2e-5  # seconds of a forward of one row, and of each further row
LEVEL, REST, TICK = 5e-5, 1e-4, 1e-6  # of a level of drafts, of all else in a step, between looks at a clock
ROWS = (1, 2, 4, 8, 16, 32)


def seconds(batch: Batch) -> Times:
    """Modelled times of a step."""
    rows = sum(step.known + len(step.tree.tokens) for step in batch)
    levels = max(step.budget.depth for step in batch)
    return Times(LEVEL * levels, FORWARD + FURTHER_ROW * (rows - 1), REST)


class ModelledController(AutoController):
    """The controller of an engine, on modelled time."""

    def __init__(self, limits: FixedController, evidence: Evidence) -> None:
        ticks = itertools.count()
        super().__init__(limits, evidence, Settings(clock=lambda: TICK * next(ticks)))

    def learn(self, commit: Commit, times: Times) -> None:
        super().learn(commit, seconds(commit.batch))


class ModelledPacer(PrefillPacer):
    """The pacer of an engine, on modelled time."""

    def learn(self, batch: Batch, _: float) -> None:
        super().learn(batch, sum(seconds(batch)))


def forward_cost(*_: object) -> ForwardCost:
    return ForwardCost({rows: FORWARD + FURTHER_ROW * (rows - 1) for rows in ROWS}, 0.0)


def install() -> None:
    """Let engines that are made from now on have these, which remember nothing of other runs."""
    vars(engine).update(PrefillPacer=ModelledPacer)
    vars(adaptive).update(
        AutoController=ModelledController, forward_cost=forward_cost, StoredJson=lambda *_: None
    )
