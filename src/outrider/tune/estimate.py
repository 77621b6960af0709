"""`outrider estimate`: what a draft model gains, before any speculative run.

1. Plain decoding answers the prompts, which gives the time of a step and of a prompt.
2. Drafts of 1 … n levels and forwards of the target over their nodes are timed in turns.
3. One teacher-forced pass of the draft over each answer gives the rank of every token in the draft's choice.
   The tokens before it are those that a draft would continue, so the steps of a chain follow exactly.
4. A tree of `siblings` a depth also has nodes off the answer.  How they compete is estimated: each is
   continued with the mean probability of the draft's best token.
"""

from __future__ import annotations

import itertools
import statistics
import time
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from outrider.bench.measure import Prompts
from outrider.core.block_table import BlockTable
from outrider.core.params import SamplingParams
from outrider.core.step import Batch, RowStep
from outrider.core.step_input import StepInput
from outrider.core.tree import Budget
from outrider.draft import PLAIN_MODEL, detect
from outrider.draft.draft_model.drafter import ModelDrafter
from outrider.drafting.trees.builder import RANK_CONFIDENCE
from outrider.errors import ConfigError
from outrider.llm import LLM
from outrider.testing.rows import make_row

REPEATS = 9  # of each timing; the median counts
CHUNK = 128  # tokens of a forward of the teacher-forced pass
SIBLINGS = (1, 2, 3)


@dataclass(frozen=True)
class Answer:
    """An answer of the target, judged by the draft.

    ranks: place of each token among the draft's best ones, -1 if it is none of them.
    probs: the draft's probabilities of its best ones, for each token.
    """

    ranks: Sequence[int]
    probs: Sequence[Sequence[float]]


@dataclass(frozen=True)
class Costs:
    """Seconds.

    prompts: all prompts, target and draft.  step: of plain decoding.  propose[siblings, depth]: drafting.
    verify[siblings, depth]: what the draft tokens add to a step.
    """

    prompts: float
    step: float
    verify: dict[tuple[int, int], float]
    propose: dict[tuple[int, int], float]


@dataclass(frozen=True)
class Estimate:
    depth: int
    siblings: int
    tokens_per_step: float
    speed: float  # tokens/s, prompts included
    gain: float  # over plain decoding

    def config(self, draft: str) -> dict[str, Any]:
        """speculative_config of this draft."""
        tree = {"siblings": self.siblings} if self.siblings > 1 else {}
        return {"method": "draft_model", "model": draft, "num_speculative_tokens": self.depth, **tree}


def estimate(
    llm: LLM, draft: str, prompts: Prompts, params: SamplingParams, depth: int, tick: Callable[[str], None]
) -> tuple[Costs, list[Estimate]]:
    """Costs, and an estimate for every depth up to `depth` and every number of siblings.

    Raises ConfigError for a draft that is no language model of the target's vocabulary.
    """
    tick("plain decoding")
    drafters = {s: _drafter(llm, draft, s, depth) for s in SIBLINGS}
    texts, step, reading = _plain(llm, prompts, params)
    tick("the draft over the answers")
    answers = [judged(drafters[1], prompt, text, params) for prompt, text in texts]
    length = int(statistics.mean(len(prompt) + len(text) // 2 for prompt, text in texts))
    propose: dict[tuple[int, int], float] = {}
    verify: dict[tuple[int, int], float] = {}
    for siblings, drafter in drafters.items():
        tick(f"drafts with {siblings} sibling{'s' * (siblings > 1)}")
        for d, seconds in enumerate(_steps(llm, drafter, length, depth)):
            propose[siblings, d], verify[siblings, d] = seconds
    reading += sum(_forward_seconds(drafters[1], len(prompt)) for prompt, _ in texts)
    costs = Costs(reading, step, verify, propose)
    return costs, predictions(answers, costs, depth)


def _drafter(llm: LLM, draft: str, siblings: int, depth: int) -> ModelDrafter:
    if (method := detect(draft)) != PLAIN_MODEL:
        raise ConfigError(f"{draft!r} is a head for {method!r}: only draft models can be estimated.")
    config = {"method": method, "model": draft, "siblings": siblings, "num_speculative_tokens": depth}
    drafter = llm.variant(config).engine.drafter
    if not isinstance(drafter, ModelDrafter) or drafter.stop.active:
        raise ConfigError(f"{draft!r} cannot be estimated: it does not draft in the target's vocabulary.")
    return drafter


def _plain(
    llm: LLM, prompts: Prompts, params: SamplingParams
) -> tuple[list[tuple[list[int], list[int]]], float, float]:
    """(prompt, answer) of every request, seconds of a decode step, and seconds of all prompts."""
    llm = llm.variant(None)
    llm.generate([prompts[0][1]], params)  # warm up
    llm.engine.forget_prefixes()
    outputs = [llm.generate([prompt], params)[0] for _, prompt in prompts]
    texts = [(output.prompt_token_ids, output.outputs[0].token_ids) for output in outputs]
    times = [output.outputs[0].token_times for output in outputs]
    steps = [after - before for each in times for before, after in itertools.pairwise(each)]
    if not steps:
        raise ConfigError("every answer has one token, which comes from prefill: give other prompts.")
    return texts, statistics.median(steps), sum(each[0] for each in times)


def judged(drafter: ModelDrafter, prompt: list[int], text: list[int], params: SamplingParams) -> Answer:
    """Ranks and probabilities of an answer's tokens, by one teacher-forced pass of the draft."""
    ids, decoder = [*prompt, *text[:-1]], drafter.decoder
    pool, slots = decoder.pool(len(ids)), array("i", range(len(ids)))
    row = make_row(prompt, seed=params.seed or 0, distribution=params.distribution)
    ranks, probs, best = list[int](), list[Sequence[float]](), max(SIBLINGS)
    sampled = params.temperature > 0
    for start in range(0, len(ids), CHUNK):
        step_input = StepInput()
        step_input.chain(slots, start, drafter._in_vocabulary(ids[start : start + CHUNK]))
        x = decoder.forward(step_input.build(), pool)
        rows = [i for i in range(step_input.length) if start + i >= len(prompt) - 1]
        logits = decoder.logits(x, rows)[:, : drafter.vocabulary] if rows else None
        for at, i in enumerate(rows):
            assert logits is not None
            path = text[: start + i + 1 - len(prompt)]
            tokens, found = drafter.sampler.top(row, path, logits, best, not sampled, at)
            token = text[len(path)]
            ranks.append(tokens.index(token) if token in tokens else -1)
            probs.append(RANK_CONFIDENCE[:best] if sampled else found)
    return Answer(ranks, probs)


# ---- times


def _medians(runs: Sequence[Callable[[], object]]) -> list[float]:
    """Median seconds of each, in interleaved rounds: a slow moment of the machine slows down all of them."""
    times = [[0.0] * 0 for _ in runs]
    for repeat in range(REPEATS + 1):
        for run, own in zip(runs, times):
            began = time.perf_counter()
            run()
            if repeat:  # the first round warms up
                own.append(time.perf_counter() - began)
    return [statistics.median(own) for own in times]


def _steps(llm: LLM, drafter: ModelDrafter, length: int, depth: int) -> list[tuple[float, float]]:
    """(seconds of drafting, seconds that its nodes add to the target's forward) for 0 … `depth` levels.

    Behind `length` tokens of context, with two tokens for the draft to catch up with.  Drafts and forwards
    alternate as in decoding, so that each finds the processor's caches as the other leaves them.
    """
    decoder, row = llm.engine.decoder, make_row([1] * length)
    slots = array("i", range(length + drafter.size(depth) + 1))
    row.table, pool = BlockTable(slots), decoder.pool(len(slots))

    def propose(levels: int) -> None:
        drafter.catch_up.cursor(row, 0).reach(length - 2)
        budget = Budget(levels, drafter.size(levels))
        drafter.propose(Batch([RowStep(row, length - 1, 1, budget=budget)]))

    def verify(levels: int) -> None:
        step_input, rows = StepInput(), 1 + (drafter.size(levels) if levels else 0)
        step_input.chain(slots, length, [1] * rows)
        step_input.logits_rows = list(range(rows))
        decoder.forward_step(step_input.build(), pool, {})

    runs = [partial(verify, 0), partial(verify, 0)]  # a step of plain decoding follows another one
    for levels in range(1, depth + 1):
        runs += [partial(propose, levels), partial(verify, levels)]
    times = _medians(runs)
    drafter.forget(row, "finished")
    plain = times[1]
    return [(0.0, 0.0), *((times[k], max(0.0, times[k + 1] - plain)) for k in range(2, len(times), 2))]


def _forward_seconds(drafter: ModelDrafter, tokens: int) -> float:
    """Seconds of the draft's forward over a prompt."""
    pool, slots = drafter.decoder.pool(tokens), array("i", range(tokens))
    step_input = StepInput()
    step_input.chain(slots, 0, [1] * tokens)
    began = time.perf_counter()
    drafter.decoder.forward(step_input.build(), pool)
    return time.perf_counter() - began


# ---- prediction


def predictions(answers: Sequence[Answer], costs: Costs, depth: int) -> list[Estimate]:
    """An estimate for plain decoding (depth 0), then for every (siblings, depth)."""
    tokens, requests = sum(len(answer.ranks) for answer in answers), len(answers)
    plain = costs.prompts + costs.step * (tokens - requests)
    made = [Estimate(0, 1, 1.0, tokens / plain, 1.0)]
    for siblings in SIBLINGS:
        for d in range(1, depth + 1):
            steps = sum(steps_of(answer, d, siblings) for answer in answers)
            extra = costs.propose[siblings, d] + costs.verify[siblings, d]
            seconds = costs.prompts + costs.step * (steps - requests) + extra * steps
            made.append(Estimate(d, siblings, tokens / steps, tokens / seconds, plain / seconds))
    return made


def steps_of(answer: Answer, depth: int, siblings: int) -> int:
    """Target forwards that emit the answer."""
    at = steps = 0
    while at < len(answer.ranks):
        at += 1 + accepted(answer, at, depth, siblings)
        steps += 1
    return steps


def accepted(answer: Answer, at: int, depth: int, siblings: int) -> int:
    """Draft tokens of a step from token `at` on that are accepted.

    A depth keeps the `siblings` likeliest nodes, by the product of probabilities.
    """
    joint, rivals = 1.0, list[float]()
    for place in range(at, min(at + depth, len(answer.ranks))):
        rank, probs = answer.ranks[place], answer.probs[place]
        if not 0 <= rank < siblings:
            return place - at
        own = joint * probs[rank]
        children = [joint * p for r, p in enumerate(probs[:siblings]) if r != rank]
        rivals = sorted([*children, *(rival * probs[0] for rival in rivals)], reverse=True)[:siblings]
        if sum(rival > own for rival in rivals) >= siblings:
            return place - at
        joint = own
    return min(depth, len(answer.ranks) - at)
