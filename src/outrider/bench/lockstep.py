"""Comparison of settings step by step, for machines whose speed varies within a second.

Every setting answers the same stream of prompts with an engine of its own.  Engines take turns after every
step, and the one that has emitted the fewest tokens is next:

    plain   step            step            step
    auto          step                            step
    suffix              step      step                  ...

So all are at the same place of the stream at the same time.  A slow moment of the machine then costs each of
them the same part of its time, and ratios stay where times do not.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from outrider.bench.measure import Configs
from outrider.core.params import SamplingParams
from outrider.engine.loop import Ticket
from outrider.llm import LLM


@dataclass
class Side:
    """One setting and its place in the stream.

    groups: prompts that are answered at once, group after group.
    seconds: of all steps so far.  tokens: emitted ids of each finished request, in order.
    """

    llm: LLM
    groups: Sequence[Sequence[Any]]
    params: SamplingParams
    seconds: float = 0.0
    steps: int = 0
    tokens: list[list[int]] = field(default_factory=list)
    begun: int = 0  # groups
    tickets: Sequence[Ticket] = ()

    @property
    def finished(self) -> bool:
        return self.begun == len(self.groups) and not self.tickets

    @property
    def progress(self) -> tuple[int, int, int]:
        """Emitted tokens, then groups begun and steps: prefill emits nothing."""
        running = sum(len(row.tokens) - row.prompt for ticket in self.tickets for row in ticket.rows)
        return sum(map(len, self.tokens)) + running, self.begun, self.steps

    def of_ideal(self, plain: Side) -> float:
        """Part of the ideal speed-up that is reached: that of drafting and forwards alone."""
        shares = [
            (side.llm.engine.times.propose + side.llm.engine.times.forward) / side.seconds
            for side in (self, plain)
        ]
        return shares[0] / shares[1]

    def advance(self) -> None:
        """Run steps until one has news; this may begin a group."""
        began = time.perf_counter()
        if not self.tickets:
            self.tickets = self.llm.enqueue(self.groups[self.begun], self.params)
            self.begun += 1
        news = iter((False, True))
        self.llm.loop.run_until(lambda: next(news))
        self.seconds += time.perf_counter() - began
        self.steps += 1
        if all(ticket.finished for ticket in self.tickets):
            rows = [row for ticket in self.tickets for row in ticket.rows]
            self.tokens += [row.tokens[row.prompt :] for row in rows]
            self.tickets = ()


def lockstep(
    llm: LLM,
    configs: Configs,
    groups: Sequence[Sequence[Any]],
    params: SamplingParams,
) -> dict[str, Side]:
    """Run the stream with every config.  A label's drafter and controller are new when it begins."""
    for config in configs.values():  # load weights and compile, outside the clock
        Side(llm.variant(config), [groups[0][:1]], params).advance()
    sides = {label: Side(llm.variant(config), groups, params) for label, config in configs.items()}
    while open_sides := [side for side in sides.values() if not side.finished]:
        min(open_sides, key=lambda side: side.progress).advance()
    return sides
