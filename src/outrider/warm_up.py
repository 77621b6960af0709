"""Warm-up: made-up requests before the real ones, which would wait for kernels and graphs otherwise."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from outrider.core.clock import record_at_once
from outrider.core.params import SamplingParams
from outrider.engine.engine import Engine

LARGEST = 256  # requests at once
# tokens of all prompts of a batch, as many as a graph has rows, and of an answer
PROMPTS, ANSWER = 512, 12
DEEPEST = 8  # drafts of fewer tokens than that come up at every depth
SALT = "warm-up"  # keeps pages, and texts that drafters learn from, apart from other requests


def warm_up(engine: Engine, answer: Callable[[Any, SamplingParams], object]) -> None:
    """Answer requests in batches of max_num_seqs, and of 1, 2, 4, … below: plain and with each drafter alone.

    answer: takes prompts, and parameters for all of them.  Drafts have their full depth, and then, of a
    drafter that finds something to draft, every smaller one, which controllers may ask for: they are not
    asked here.  Neither they nor drafters learn from it, and no statistics count it.
    """
    numbers, vocabulary = random.Random(0), engine.target.vocabulary
    plain = SamplingParams(
        max_tokens=ANSWER, temperature=0, ignore_eos=True, detokenize=False, speculate=False
    )
    drafted = [replace(plain, speculate=True, draft_method=name) for name in engine.drafter.sources]
    most = min(engine.options.max_num_seqs, LARGEST)
    counts = sorted({most, *[1 << i for i in range(most.bit_length())]})
    with _left_as_it_was(engine), record_at_once():
        for count in reversed(counts):  # what there is no room for is lost by the largest batches
            length = max(1, min(PROMPTS // count, engine.max_len - ANSWER))
            for params in (plain, *drafted):
                ids = [[numbers.randrange(vocabulary) for _ in range(length)] for _ in range(count)]
                prompts = [{"prompt_token_ids": prompt, "cache_salt": SALT} for prompt in ids]
                drafts = engine.decode.drafts
                answer(prompts, params)
                if engine.decode.drafts == drafts:
                    continue
                for depth in range(1, min(engine.drafter.depth, DEEPEST)):
                    # one draft, beside two other tokens
                    answer(prompts, replace(params, max_draft_tokens=depth, max_tokens=depth + 2))


@contextmanager
def _left_as_it_was(engine: Engine) -> Iterator[None]:
    """Draft without a controller that chooses, and forget what was learned and counted in between."""
    controller, adaptive = engine.controller, engine.adaptive
    memory, paced = copy.deepcopy(engine.drafter.memory), copy.deepcopy(vars(engine.pacer))
    if adaptive:
        engine.controller, engine.adaptive = adaptive[0].limits, []
    try:
        yield
    finally:
        engine.controller, engine.adaptive = controller, adaptive
        engine.drafter.memory = memory
        vars(engine.pacer).update(paced)
        engine.forget_prefixes()
        engine.reset()
        engine.scheduler.prefix_queries = engine.scheduler.prefix_hits = engine.scheduler.preemptions = 0
