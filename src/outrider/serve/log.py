"""A line about throughput every few seconds, while there is any."""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import dataclass

from outrider.control.auto import AutoController
from outrider.core.block_table import PAGE
from outrider.engine.engine import Engine
from outrider.serve.state import Server

log = logging.getLogger("outrider.serve")


@dataclass
class Counts:
    """Sums of the engine at one time."""

    prompt: int = 0
    emitted: int = 0
    rows: int = 0
    decoded: int = 0
    drafted: int = 0
    accepted: int = 0
    queries: int = 0
    hits: int = 0

    @staticmethod
    def of(server: Server) -> Counts:
        assert server.engine_ is not None
        engine = server.engine_.llm.engine
        works = engine.prefill, engine.decode
        return Counts(
            sum(work.prompt for work in works),
            sum(work.emitted for work in works),
            engine.decode.rows,
            engine.decode.emitted,
            sum(work.drafted for work in works),
            sum(work.accepted for work in works),
            engine.scheduler.prefix_queries,
            engine.scheduler.prefix_hits,
        )

    def since(self, before: Counts) -> Counts:
        return Counts(*(now - then for now, then in zip(vars(self).values(), vars(before).values())))


def described(engine: Engine) -> str:
    """What an engine drafts with, and its limits, in one line."""
    chosen = ", as far as they pay" if isinstance(engine.controller, AutoController) else ""
    return (
        f"drafters: {', '.join(engine.drafter.sources) or 'none'}{chosen}; context {engine.max_len} tokens, "
        f"KV cache {engine.cache.pages * PAGE} tokens, {engine.options.max_num_seqs} samples at once"
    )


async def log_throughput(server: Server) -> None:
    """Log the throughput of every log_interval seconds and of the last ones, unless nothing happened."""
    before, began = Counts(), time.monotonic()
    ending = False
    while not ending:
        try:
            await asyncio.sleep(server.options.log_interval)
        except asyncio.CancelledError:
            ending = True
        if server.engine_ is None:
            continue
        now, ended = Counts.of(server), time.monotonic()
        if now != before:
            log.info(line(server, now.since(before), ended - began))
        before, began = now, ended


def line(server: Server, counts: Counts, seconds: float) -> str:
    assert server.engine_ is not None
    engine = server.engine_.llm.engine
    used = 1 - engine.cache.available / engine.cache.pages
    text = (
        f"prompt {counts.prompt / seconds:.1f} tokens/s, output {counts.emitted / seconds:.1f} tokens/s, "
        f"running {len(engine.scheduler.running)}, waiting {len(engine.scheduler.waiting)}, "
        f"KV cache {used:.1%}, prefix hits {counts.hits / (counts.queries or 1):.1%}"
    )
    if counts.drafted:
        text += (
            f", {counts.decoded / (counts.rows or 1):.2f} tokens per step, "
            f"acceptance {counts.accepted / counts.drafted:.1%}"
        )
    return text
