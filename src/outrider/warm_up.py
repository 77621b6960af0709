"""Warm-up: made-up requests before the real ones, which would wait for kernels and graphs otherwise."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from outrider.core.clock import record_at_once
from outrider.core.params import SamplingParams
from outrider.engine.engine import Engine

LARGEST = 256  # requests at once
PROMPT, ANSWER = 8, 12  # tokens
SALT = "warm-up"  # keeps pages, and what drafters learn, from other requests


def warm_up(engine: Engine, answer: Callable[[Any, SamplingParams], object]) -> None:
    """Answer requests in batches of 1, 2, 4, … up to max_num_seqs: plain, and with each drafter alone.

    answer: takes prompts, and parameters for all of them.  Drafts have their full depth, and controllers are
    not asked.  Neither they nor drafters learn from it, and no statistics count it.
    """
    numbers, vocabulary = random.Random(0), engine.target.vocabulary
    plain = SamplingParams(
        max_tokens=ANSWER, temperature=0, ignore_eos=True, detokenize=False, speculate=False
    )
    drafted = [replace(plain, speculate=True, draft_method=name) for name in engine.drafter.sources]
    most = min(engine.options.max_num_seqs, LARGEST)
    with _drafting_by_limits(engine), record_at_once():
        for count in [1 << i for i in range(most.bit_length())]:
            for params in (plain, *drafted):
                ids = [[numbers.randrange(vocabulary) for _ in range(PROMPT)] for _ in range(count)]
                answer([{"prompt_token_ids": prompt, "cache_salt": SALT} for prompt in ids], params)


@contextmanager
def _drafting_by_limits(engine: Engine) -> Iterator[None]:
    """Without a controller that chooses and learns."""
    controller, adaptive = engine.controller, engine.adaptive
    if adaptive:
        engine.controller, engine.adaptive = adaptive[0].limits, []
    try:
        yield
    finally:
        engine.controller, engine.adaptive = controller, adaptive
        engine.forget_prefixes()
        engine.reset()
        engine.scheduler.prefix_queries = engine.scheduler.prefix_hits = 0
