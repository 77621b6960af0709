"""A line about throughput every few seconds, while there is any."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping

from outrider.control.auto import AutoController
from outrider.core.block_table import PAGE
from outrider.engine.engine import Engine
from outrider.serve.metrics import counts_of
from outrider.serve.state import Server

log = logging.getLogger("outrider.serve")


def described(engine: Engine) -> str:
    """The drafters of an engine, and its limits, in one line."""
    chosen = ", as far as they pay" if isinstance(engine.controller, AutoController) else ""
    return (
        f"drafters: {', '.join(engine.drafter.sources) or 'none'}{chosen}; context {engine.max_len} tokens, "
        f"KV cache {engine.cache.pages * PAGE} tokens, {engine.max_num_seqs} samples at once"
    )


async def log_throughput(server: Server) -> None:
    """Log the throughput of every log_interval seconds and of the last ones, unless nothing happened."""
    before, began = dict[str, float](), time.monotonic()
    ending = False
    while not ending:
        try:
            await asyncio.sleep(server.options.log_interval)
        except asyncio.CancelledError:
            ending = True
        if server.engine_ is None:
            continue
        engine, ended = server.llm.engine, time.monotonic()
        work = {"decode_rows": engine.decode.rows, "decode_emitted": engine.decode.emitted}
        now = {**counts_of(engine), **work}
        counts = {name: value - before.get(name, 0.0) for name, value in now.items()}
        if any(counts.values()):
            log.info(line(engine, counts, ended - began))
        before, began = now, ended


def line(engine: Engine, counts: Mapping[str, float], seconds: float) -> str:
    """Throughput of so many seconds, by what the counts have grown."""
    used = 1 - engine.cache.available / engine.cache.pages
    hits = counts["prefix_cache_hits"] / (counts["prefix_cache_queries"] or 1)
    text = (
        f"prompt {counts['prompt_tokens'] / seconds:.1f} tokens/s, "
        f"output {counts['generation_tokens'] / seconds:.1f} tokens/s, "
        f"running {len(engine.scheduler.running)}, waiting {len(engine.scheduler.waiting)}, "
        f"KV cache {used:.1%}, prefix hits {hits:.1%}"
    )
    if drafted := counts["spec_decode_num_draft_tokens"]:
        per_step = counts["decode_emitted"] / (counts["decode_rows"] or 1)
        accepted = counts["spec_decode_num_accepted_tokens"] / drafted
        text += f", {per_step:.2f} tokens per step, acceptance {accepted:.1%}"
    return text
