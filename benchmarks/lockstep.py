"""Comparison of settings step by step, for machines whose speed varies within a second.

Every setting answers the same stream of prompts with an engine of its own.  Engines take turns after every
step, and the one that has emitted the fewest tokens is next:

    plain   step            step            step
    auto          step                            step
    suffix              step      step                  ...

So all are at the same place of the stream at the same time.  A slow moment of the machine then costs each of
them the same part of its time, and ratios stay where times do not.

The batch is always full: the next prompt begins where one ends, as on a busy server.  A setting has finished
when it has emitted so many tokens, while prompts are left: in a closed batch the slowest request would
decide.  Lengths should vary: of equal ones, plain decoding begins and ends all at once, and computes prompts
together.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from outrider.bench.measure import Configs
from outrider.core.params import SamplingParams
from outrider.core.row import Row
from outrider.engine.loop import Ticket
from outrider.llm import LLM


@dataclass
class Side:
    """One setting and its place in the stream.

    params: one for each prompt.  batch: requests at once.  tokens: to emit.
    seconds: of all steps so far.  tickets: of all prompts that have begun, in order.
    """

    llm: LLM
    prompts: Sequence[Any]
    params: Sequence[SamplingParams]
    batch: int
    tokens: int
    seconds: float = 0.0
    steps: int = 0
    tickets: list[Ticket] = field(default_factory=list)

    @property
    def rows(self) -> list[Row]:
        """Of each prompt that has begun."""
        return [row for ticket in self.tickets for row in ticket.rows]

    @property
    def outputs(self) -> list[list[int]]:
        """Ids emitted for each prompt that has begun."""
        return [row.tokens[row.prompt :] for row in self.rows]

    @property
    def progress(self) -> tuple[int, int]:
        """Emitted tokens, then steps: prefill emits nothing."""
        return sum([len(row.tokens) - row.prompt for row in self.rows]), self.steps

    @property
    def finished(self) -> bool:
        return self.progress[0] >= self.tokens

    def advance(self) -> None:
        """Run steps until one has news.  Prompts begin while there is room."""
        began = time.perf_counter()
        while len(self.llm.loop.tickets) < self.batch and len(self.tickets) < len(self.prompts):
            i = len(self.tickets)
            self.tickets += self.llm.enqueue(self.prompts[i], self.params[i])
        if not self.llm.loop.tickets:
            raise ValueError(
                f"the outputs of {len(self.prompts)} prompts have fewer than {self.tokens} tokens."
            )
        news = iter((False, True))
        self.llm.loop.run_until(lambda: next(news))
        self.seconds += time.perf_counter() - began
        self.steps += 1

    def of_ideal(self, plain: Side) -> float:
        """Part of the ideal speed-up that is reached: that of drafting and forwards alone."""
        return self.model_share / plain.model_share

    @property
    def model_share(self) -> float:
        """Share of the seconds spent on drafting and forwards."""
        times = self.llm.engine.times
        return (times.propose + times.forward) / self.seconds

    def agrees(self, other: Side) -> bool:
        """Whether both have emitted the same tokens, as far as both are."""
        pairs = list(zip(self.outputs, other.outputs))
        return all(mine[: len(theirs)] == theirs[: len(mine)] for mine, theirs in pairs)


def lockstep(
    llm: LLM,
    configs: Configs,
    prompts: Sequence[Any],
    params: Sequence[SamplingParams],
    batch: int,
    tokens: int,
) -> dict[str, Side]:
    """Run the stream with every config until it has emitted so many tokens.

    params: one for each prompt.  A label's drafter and controller are new when it begins.
    Raises ValueError if the outputs of all prompts have fewer tokens.
    """
    for config in configs.values():  # load weights and compile, outside the clock
        Side(llm.variant(config), prompts[:1], params[:1], 1, 1).advance()
    gc.collect()  # engines refer to themselves, and hold their K/V until then
    sides = {
        label: Side(llm.variant(config), prompts, params, batch, tokens) for label, config in configs.items()
    }
    while open_sides := [side for side in sides.values() if not side.finished]:
        min(open_sides, key=lambda side: side.progress).advance()
    return sides
