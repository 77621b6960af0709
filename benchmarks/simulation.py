"""Discrete-event simulation of replicas that batch continuously, with and without speculation.

A step computes a chunk of prompts, one token of every decoding row, and its draft.  Its seconds come from a
`Cost`: a machine's data sheet (scale.py), or measured steps of an engine (scale_real.py).
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import mean, quantiles
from typing import Any, Protocol

MOST_DEPTH = 8
CHUNK = 512  # prompt tokens of a step


class Cost(Protocol):
    """Seconds of steps."""

    def forward(self, rows: int, context: int) -> float: ...

    def draft(self, depth: int, batch: int, prompt: int = 0) -> float:
        """Chains for `batch` rows, and `prompt` tokens that the draft computes too."""

    def step(self, rows: int, context: int, depth: int, batch: int, prompt: int = 0) -> float:
        """A forward of `rows`, of which `batch` requests with chains of `depth`, one after the other."""
        seconds = self.forward(rows, context)
        return seconds + self.draft(depth if batch else 0, batch, prompt) if depth else seconds


@dataclass
class Trace:
    """Accepted lengths of drafts of MOST_DEPTH tokens, of several runs."""

    runs: list[list[int]]

    def emitted(self, depth: int) -> float:
        """Mean tokens of a step."""
        lengths = [length for run in self.runs for length in run]
        return 1 + sum(min(length, depth) for length in lengths) / len(lengths)

    def emitted_by_depth(self) -> list[float]:
        return [self.emitted(depth) for depth in range(MOST_DEPTH + 1)]


def best_depth(cost: Cost, gains: Sequence[float], batch: int, context: int) -> int:
    """The depth with the most tokens a second, as a controller with these figures chooses.

    Prompts of the same step do not count: they have to be computed at any depth.
    """

    def rate(depth: int) -> float:
        return gains[depth] / cost.step(batch * (1 + depth), context, depth, batch)

    return max(range(len(gains)), key=rate)


@dataclass
class Request:
    arrival: float
    prompt: int
    tokens: int
    run: Sequence[int]
    at: int = 0  # of its run
    read: int = 0  # prompt tokens computed
    made: int = 0
    first: float = 0.0


@dataclass
class Replica:
    """Queue and batch of one replica."""

    cost: Cost
    gains: Sequence[float]
    depth: int | None  # None: the best for the batch
    most: int
    waiting: deque[Request] = field(default_factory=deque)
    running: list[Request] = field(default_factory=list)
    busy: bool = False
    depths: list[int] = field(default_factory=list)

    @property
    def open(self) -> int:
        return len(self.waiting) + len(self.running)

    def step(self) -> tuple[float, list[tuple[Request, int]]]:
        """Seconds of a step, and the tokens that it emits at its end."""
        while self.waiting and len(self.running) < self.most:
            self.running.append(self.waiting.popleft())
        chunk, ready, first = CHUNK, list[Request](), list[Request]()
        for request in self.running:
            if request.read == request.prompt:
                ready.append(request)
            elif chunk:
                part = min(chunk, request.prompt - request.read)
                request.read += part
                chunk -= part
                first += [request] * (request.read == request.prompt)
        context = sum(request.read + request.made for request in self.running)
        depth = self.depth
        if depth is None:
            depth = best_depth(self.cost, self.gains, max(1, len(ready)), context)
        if ready:
            self.depths.append(depth)
        depths = [
            min(depth, request.tokens - request.made - 1) for request in ready
        ]  # the last is not drafted
        prompt, drafting = CHUNK - chunk, len(ready) - depths.count(0)
        seconds = self.cost.step(len(ready) + sum(depths) + prompt, context, depth, drafting, prompt)
        emitted = [(request, self._emitted(request, own)) for request, own in zip(ready, depths)]
        return seconds, emitted + [(request, 1) for request in first]

    def _emitted(self, request: Request, depth: int) -> int:
        length = request.run[request.at % len(request.run)]
        request.at += 1
        return 1 + min(length, depth)

    def take(self, emitted: Sequence[tuple[Request, int]], now: float) -> list[Request]:
        """Count the tokens of a step.  Returns the requests that end with it."""
        for request, tokens in emitted:
            request.first = request.first or now
            request.made += tokens
        ended = [request for request, _ in emitted if request.made == request.tokens]
        for request in ended:
            self.running.remove(request)
        return ended


@dataclass(frozen=True)
class Figures:
    """Of one run: output tokens a second, latencies of requests in seconds, ms a token, mean depth."""

    tokens_per_second: float
    p50: float
    p99: float
    token_ms: float
    depth: float


def simulate(replicas: Sequence[Replica], requests: Sequence[Request]) -> Figures:
    """Run until the last request arrives.  Figures are of the second half of that time."""
    events: list[tuple[float, int, Any]] = [(r.arrival, i, r) for i, r in enumerate(requests)]
    heapq.heapify(events)
    number, done, total = len(events), [], 0
    half, end = (requests[0].arrival + requests[-1].arrival) / 2, requests[-1].arrival
    loads = [(0, i) for i in range(len(replicas))]
    heapq.heapify(loads)
    while events[0][0] < end:
        now, _, what = heapq.heappop(events)
        if isinstance(what, Request):
            index = _least(loads, replicas)
            replicas[index].waiting.append(what)
            heapq.heappush(loads, (replicas[index].open, index))
        else:
            index, emitted = what
            ended = replicas[index].take(emitted, now)
            if now > half:
                total += sum(tokens for _, tokens in emitted)
                done += [(now - r.arrival, (now - r.first) / (r.tokens - 1)) for r in ended]
            heapq.heappush(loads, (replicas[index].open, index))
            replicas[index].busy = False
        replica = replicas[index]
        if replica.open and not replica.busy:
            seconds, later = replica.step()
            replica.busy = True
            heapq.heappush(events, (now + seconds, number, (index, later)))
            number += 1
    latencies = sorted(latency for latency, _ in done)
    cuts = quantiles(latencies, n=100) if len(latencies) > 1 else latencies * 99
    depths = [depth for replica in replicas for depth in replica.depths]
    return Figures(total / (end - half), cuts[49], cuts[98], 1e3 * mean(t for _, t in done), mean(depths))


def closed(replica: Replica, requests: Sequence[Request]) -> float:
    """Seconds until one replica has answered requests that are all there at the start."""
    replica.waiting.extend(requests)
    now = 0.0
    while replica.open:
        seconds, emitted = replica.step()
        now += seconds
        replica.take(emitted, now)
    return now


def _least(loads: list[tuple[int, int]], replicas: Sequence[Replica]) -> int:
    """The replica with the fewest open requests; entries of a heap that are out of date are dropped."""
    while True:
        load, index = heapq.heappop(loads)
        if load == replicas[index].open:
            return index
