"""Warm-up: made-up requests before the real ones, which would wait for kernels and graphs otherwise."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from outrider.control.first_costs import FirstCosts
from outrider.core.clock import record_at_once
from outrider.core.device import power_of_two
from outrider.core.params import SamplingParams
from outrider.engine.engine import Engine

LARGEST = 256  # requests at once
PROMPTS, ANSWER = 512, 12  # tokens of all prompts of a batch, as many as a graph has rows, and of an answer
DEEPEST = 8  # drafts of fewer tokens than that come up at every depth
SALT = "warm-up"  # keeps pages, and texts that drafters learn from, apart from other requests
Answer = Callable[[Any, SamplingParams], object]


def warm_up(engine: Engine, answer: Answer) -> None:
    """Answer requests in batches of max_num_seqs and of 1, 2, 4, … below, and single prompts of all lengths.

    answer: takes prompts, and parameters for all of them.  Batches are plain, drafted for by each drafter
    alone, and by all of them.  Drafts have their full depth, and then, of a drafter that finds something to
    draft, every smaller one, which adaptive controllers may ask for.  These are not asked here, and learn
    only what steps cost.  Drafters learn nothing from it, and no statistics count it.
    """
    plain = SamplingParams(
        max_tokens=ANSWER, temperature=0, ignore_eos=True, detokenize=False, speculate=False
    )
    together, sources = replace(plain, speculate=True), engine.drafter.sources
    ways = [replace(together, draft_method=name) for name in sources]
    if len(sources) > 1:
        ways.append(together)
    made_up = _MadeUp(engine, answer)
    most = min(engine.options.max_num_seqs, LARGEST)
    with _left_as_it_was(engine), record_at_once():
        for count in sorted({most, *_powers(most)}, reverse=True):
            # what there is no room for is lost by the largest batches
            made_up.requests(count, PROMPTS // count, plain)
            for params in ways:
                made_up.drafts(count, params)
        # The longest has a chunk without logits.  Heads read one that fills its last page in a later step.
        for length in reversed(_powers(2 * PROMPTS)[1:]):
            made_up.requests(1, max(2, length - 1), replace(together, max_tokens=1))


def _powers(most: int) -> list[int]:
    """1, 2, 4, … up to a number."""
    return [1 << i for i in range(most.bit_length())]


class _MadeUp:
    """Maker of requests with random prompts."""

    def __init__(self, engine: Engine, answer: Answer) -> None:
        self.engine, self.answer, self.numbers = engine, answer, random.Random(0)

    def requests(self, count: int, length: int, params: SamplingParams) -> None:
        """Answer so many, with prompts of this length, or as long as there is room for."""
        length = max(1, min(length, self.engine.max_len - (params.max_tokens or 0)))
        vocabulary = self.engine.target.vocabulary
        ids = [[self.numbers.randrange(vocabulary) for _ in range(length)] for _ in range(count)]
        self.answer([{"prompt_token_ids": prompt, "cache_salt": SALT} for prompt in ids], params)

    def drafts(self, count: int, params: SamplingParams) -> None:
        """Answer so many with drafts of full depth, and if there are any, with shorter ones."""
        engine = self.engine
        drafts, full = engine.decode.drafts, engine.drafter.depth
        self.requests(count, PROMPTS // count, params)
        if engine.decode.drafts == drafts:
            return
        for depth in sorted({*range(1, min(full, DEEPEST)), full}):
            # A step has less room for deep drafts of many rows.  Then these are of as many as fit, if no
            # smaller batch has as many.
            fitting = max(1, min(count, engine.options.max_num_batched_tokens // (1 + depth)))
            if power_of_two(fitting) == power_of_two(count):
                # one draft, beside two other tokens; of one token several, for their costs beside deep ones
                tokens = ANSWER if depth == 1 else depth + 2
                short = replace(params, max_draft_tokens=depth, max_tokens=tokens)
                self.requests(fitting, PROMPTS // count, short)


@contextmanager
def _left_as_it_was(engine: Engine) -> Iterator[None]:
    """Draft without a controller that chooses, and forget what was learned and counted in between.

    Adaptive controllers keep what steps have cost.
    """
    controller, adaptive = engine.controller, engine.adaptive
    memory, paced = copy.deepcopy(engine.drafter.memory), copy.deepcopy(vars(engine.pacer))
    costs = FirstCosts(adaptive[0].limits, adaptive[0].evidence) if adaptive else None
    if costs is not None:
        engine.controller, engine.adaptive = costs, []
    try:
        yield
        if costs is not None:
            costs.teach()
    finally:
        engine.controller, engine.adaptive = controller, adaptive
        engine.drafter.memory = memory
        vars(engine.pacer).update(paced)
        engine.forget_prefixes()
        engine.reset()
        engine.scheduler.prefix_queries = engine.scheduler.prefix_hits = engine.scheduler.preemptions = 0
