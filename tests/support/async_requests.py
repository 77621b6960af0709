"""Requests of asyncio tasks on one engine."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from patience import HANG

from outrider import AsyncLLM, SamplingParams
from outrider.testing import check_idle, random_prompts

PROMPTS = [{"prompt_token_ids": ids} for ids in random_prompts(8, seed=4)]


def params_of(i: int, **given: Any) -> SamplingParams:
    return SamplingParams(
        **{"temperature": 0.8 * (i % 2), "seed": i, "max_tokens": 8 + i, "ignore_eos": True, **given}
    )


def running(engine: AsyncLLM, task: Callable[[], Awaitable[None]]) -> None:
    """Run a task in a new event loop, and check that it leaves nothing in the engine."""

    async def limited() -> None:
        await asyncio.wait_for(task(), 2 * HANG)
        while engine.llm.has_unfinished_requests():
            await asyncio.sleep(0.001)

    asyncio.run(limited())
    check_idle(engine.llm)
