"""Steps of the pair of gpu_pair.py, by kind: what takes how long on the host, and what was launched.

    prefill     with prompt tokens        rest   an adaptive controller rests
    plain       without drafts            else   the drafters that were asked, by number

Parts of a step contain one another: `launch` is the beginning of a step, with `next` … `begin`; `complete`
its end, with `wait` for the device, `verify` … `learn`.  `Steps` replaces methods of an engine by timed ones,
which takes time of its own.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

from outrider import LLM
from outrider.backends.triton.graphs import counts_of_all
from outrider.engine.flights import Flight

# methods of the engine, and of its parts -> name of the part of a step
OF_ENGINE = {"_launch": "launch", "_complete": "complete", "verify": "verify", "_commit": "commit",
             "_finish": "finish", "_settle": "settle"}  # fmt: skip
OF_PARTS = {"scheduler": ("next", "reserve", "clip", "commit"), "runner": ("begin",),
            "proposer": ("budgets", "propose", "observe"), "controller": ("learn", "trim")}  # fmt: skip


@dataclass
class Step:
    """parts: seconds.  launched, recorded: jobs without a graph, and recordings."""

    kind: str = ""
    seconds: float = 0.0
    rows: int = 0
    nodes: int = 0
    emitted: int = 0
    launched: int = 0
    recorded: int = 0
    parts: dict[str, float] = field(default_factory=lambda: defaultdict(float))


class Steps:
    """The steps of one engine, in a `with` block."""

    def __init__(self, llm: LLM) -> None:
        self.engine, self.steps, self.now = llm.engine, list[Step](), Step()
        self.patches = ExitStack()

    def __enter__(self) -> Steps:
        engine = self.engine
        for method, part in OF_ENGINE.items():
            self._replace(engine, method, self._timed(part, getattr(engine, method)))
        for name, methods in OF_PARTS.items():
            of = getattr(engine, name)
            for method in methods:
                self._replace(of, method, self._timed(f"{name}.{method}", getattr(of, method)))
        self._replace(Flight, "result", self._timed("wait", Flight.result))
        complete, step = engine._complete, engine.step

        def completed(flight: Flight) -> Any:
            self.now.kind = kind_of(flight)
            rows, batch = complete(flight), flight.batch
            self.now.rows, self.now.nodes = len(batch), sum(len(each.tree.tokens) for each in batch)
            self.now.emitted = sum(len(each.emitted) for each in batch)
            return rows

        def stepped() -> Any:
            self.now, before, began = Step(), counts_of_all(), time.perf_counter()
            rows = step()
            self.now.seconds, after = time.perf_counter() - began, counts_of_all()
            self.now.launched = after.launched - before.launched
            self.now.recorded = after.recorded - before.recorded
            if self.now.kind:
                self.steps.append(self.now)
            return rows

        self._replace(engine, "_complete", completed)
        self._replace(engine, "step", stepped)
        return self

    def __exit__(self, *error: object) -> None:
        self.patches.close()

    def _replace(self, of: Any, name: str, call: Callable[..., Any]) -> None:
        self.patches.enter_context(mock.patch.object(of, name, call))

    def _timed(self, part: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **named: Any) -> Any:
            began = time.perf_counter()
            try:
                return call(*args, **named)
            finally:
                self.now.parts[part] += time.perf_counter() - began

        return timed

    def table(self) -> dict[str, Any]:
        """Means over the steps of each kind, in milliseconds, apart for those with launches or recordings."""
        groups = defaultdict[str, list[Step]](list)
        for step in self.steps:
            how = ", recorded" if step.recorded else ", launched" if step.launched else ""
            groups[step.kind + how].append(step)
        return {kind: means(steps) for kind, steps in sorted(groups.items())}


def kind_of(flight: Flight) -> str:
    controller: Any = flight.controller
    if flight.batch.prefill:
        return "prefill"
    if getattr(controller, "rest", None) is not None:
        return "rest"
    asked = Counter(k for tried in getattr(controller, "tries", {}).values() for k in tried.asked)
    return "+".join(map(str, sorted(asked))) or "plain"


def means(steps: Sequence[Step]) -> dict[str, Any]:
    def mean(of: Callable[[Step], float]) -> float:
        return sum(map(of, steps)) / len(steps)

    parts = dict[str, float]()
    for step in steps:
        for part, seconds in step.parts.items():
            parts[part] = parts.get(part, 0.0) + seconds / len(steps)
    return {
        "n": len(steps),
        "ms": round(1e3 * mean(lambda step: step.seconds), 2),
        "rows": round(mean(lambda step: step.rows), 1),
        "nodes": round(mean(lambda step: step.nodes), 1),
        "emitted": round(mean(lambda step: step.emitted), 1),
        "parts": {part: round(1e3 * seconds, 3) for part, seconds in sorted(parts.items())},
    }
