"""`outrider estimate`: what a draft model gains, before any speculative run.

1. Plain decoding answers the prompts, which gives the time of a step and of a prompt.
2. A few steps with drafts of each depth are timed, in turns with plain ones.  The setting that seems the best
   is timed anew: it may have been the fastest by chance.
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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from outrider.bench.measure import Prompts
from outrider.control.fixed import FixedController
from outrider.core.clock import Times
from outrider.core.params import SamplingParams
from outrider.core.step_input import StepInput
from outrider.draft import PLAIN_MODEL, detect
from outrider.draft.draft_model.drafter import ModelDrafter
from outrider.drafting.trees.builder import RANK_CONFIDENCE
from outrider.errors import ConfigError
from outrider.llm import LLM
from outrider.testing.rows import make_row

WARM, STEPS = 2, 6  # steps before each timing, whose weights and caches are cold, and steps of it
REPEATS = 3  # of each timing, behind as many texts; the median counts
AGAIN = 7  # of the timing of the best setting
CHUNK = 128  # tokens of a forward of the teacher-forced pass
SIBLINGS = (1, 2, 3)
Shape = tuple[int, int]  # siblings and depth
Seconds = dict[Shape, float]


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

    prompts: all prompts, target and draft.  step: of plain decoding.  propose: drafting.  verify: what the
    draft tokens add to the rest of a step.
    """

    prompts: float
    step: float
    propose: Seconds
    verify: Seconds


@dataclass(frozen=True)
class Estimate:
    """A tree of `siblings` nodes in each of `depth` levels.  speed: tokens/s, prompts included.
    gain: over plain decoding.
    """

    depth: int
    siblings: int
    tokens_per_step: float
    speed: float
    gain: float

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
    variants = {siblings: _variant(llm, draft, siblings, depth) for siblings in SIBLINGS}
    drafter = _drafter(variants[1])
    plain = _plain(llm, prompts, params)
    tick("the draft over the answers")
    answers = [judged(drafter, text.prompt, text.answer, params) for text in plain.texts]
    prompt_seconds = plain.prompts
    prompt_seconds += sum(_forward_seconds(drafter, len(text.prompt)) for text in plain.texts)
    tick("steps")
    texts = sorted(plain.texts, key=lambda text: len(text.prompt))
    begun: list[list[int]] = []  # texts of several lengths, up to the middle of the answer
    for i in range(REPEATS):
        text = texts[(2 * i + 1) * len(texts) // (2 * REPEATS)]
        begun.append(text.prompt + text.answer[: len(text.answer) // 2])
    return settled(Rounds(llm, variants, begun, params), answers, prompt_seconds, plain.step)


def _variant(llm: LLM, draft: str, siblings: int, depth: int) -> LLM:
    if (method := detect(draft)) != PLAIN_MODEL:
        raise ConfigError(f"{draft!r} is a head for {method!r}: only draft models can be estimated.")
    config = {"method": method, "model": draft, "siblings": siblings, "num_speculative_tokens": depth}
    variant = llm.variant(config)
    if _drafter(variant).one_pass is not None:
        raise ConfigError(
            f"{draft!r} is a PARD model, whose deeper tokens cannot be estimated from known text: measure it "
            "with `outrider bench`."
        )
    if _drafter(variant).stop.active:
        raise ConfigError(f"{draft!r} cannot be estimated: it does not draft in the target's vocabulary.")
    return variant


def _drafter(variant: LLM) -> ModelDrafter:
    assert isinstance(variant.engine.drafter, ModelDrafter)
    return variant.engine.drafter


class Text(NamedTuple):
    """Token ids of a request."""

    prompt: list[int]
    answer: list[int]


class Plain(NamedTuple):
    """Plain decoding: the texts, median seconds of a decode step, and seconds of all prompts."""

    texts: list[Text]
    step: float
    prompts: float


def _plain(llm: LLM, prompts: Prompts, params: SamplingParams) -> Plain:
    llm = llm.variant(None)
    llm.generate([prompts[0][1]], params)  # warm up
    llm.engine.forget_prefixes()
    texts, steps, prompt_seconds = list[Text](), list[float](), 0.0
    for _, prompt in prompts:
        (output,) = llm.generate([prompt], params)
        answer = output.outputs[0]
        texts.append(Text(output.prompt_token_ids, answer.token_ids))
        prompt_seconds += answer.token_times[0]
        steps += [after - before for before, after in itertools.pairwise(answer.token_times)]
    if not steps:
        raise ConfigError("every answer has one token, which comes from prefill: give other prompts.")
    return Plain(texts, statistics.median(steps), prompt_seconds)


def judged(drafter: ModelDrafter, prompt: list[int], text: list[int], params: SamplingParams) -> Answer:
    """Ranks and probabilities of an answer's tokens, by one teacher-forced pass of the draft."""
    ids, decoder = [*prompt, *text[:-1]], drafter.decoder
    pool, slots = decoder.pool(len(ids)), array("i", range(len(ids)))
    row = make_row(prompt, seed=params.seed or 0, distribution=params.distribution)
    ranks, probs, best = list[int](), list[Sequence[float]](), max(SIBLINGS)
    sampled = params.temperature > 0
    for start in range(0, len(ids), CHUNK):
        step_input = StepInput.of_chain(slots, start, drafter.in_vocabulary(ids[start : start + CHUNK]))
        x = decoder.forward(step_input, pool)
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


class Sample(NamedTuple):
    """Drafting, and the rest of a step beyond a plain one, both in plain steps of that moment."""

    propose: float
    verify: float


class Rounds:
    """Timings of steps with drafts, each beside plain steps behind the same text.

    samples: relative to plain steps, so a slow minute of the machine changes nothing.
    """

    def __init__(
        self, llm: LLM, variants: Mapping[int, LLM], texts: Sequence[list[int]], params: SamplingParams
    ) -> None:
        self.variants, self.plain = variants, llm.variant(None)
        self.depth = max(_controller(variant).depth for variant in variants.values())
        most = (WARM + STEPS + 1) * (self.depth + 1)
        if most >= llm.engine.max_len:
            raise ConfigError(
                f"a context of {llm.engine.max_len} tokens is too short to measure drafts of {self.depth} "
                f"(that takes {most}): give a smaller --draft or a larger context."
            )
        self.texts = itertools.cycle([ids[: llm.engine.max_len - most] for ids in texts])
        self.params = replace(params, max_tokens=most, ignore_eos=True, stop=None, stop_token_ids=None)
        self.samples: dict[Shape, list[Sample]] = {}

    def run(self, shapes: Sequence[Shape], rounds: int) -> None:
        for _ in range(rounds):
            ids = next(self.texts)
            base = sum(_times(self.plain, ids, self.params))
            for siblings, levels in shapes:
                _controller(self.variants[siblings]).depth = levels
                times = _times(self.variants[siblings], ids, self.params)
                sample = Sample(times.propose / base, (sum(times) - times.propose) / base - 1)
                self.samples.setdefault((siblings, levels), []).append(sample)

    def costs(self, prompts: float, step: float) -> Costs:
        """Medians.  Shapes of as many nodes cost the same to verify, so their timings count together."""
        verify_by_nodes: dict[int, list[float]] = {}
        for (siblings, depth), samples in self.samples.items():
            verify_by_nodes.setdefault(siblings * depth, []).extend(sample.verify for sample in samples)
        propose: Seconds = {(siblings, 0): 0.0 for siblings in self.variants}
        verify = dict(propose)
        for shape, samples in self.samples.items():
            siblings, depth = shape
            propose[shape] = step * statistics.median(sample.propose for sample in samples)
            verify[shape] = step * max(0.0, statistics.median(verify_by_nodes[siblings * depth]))
        return Costs(prompts, step, propose, verify)


def settled(
    rounds: Rounds, answers: Sequence[Answer], prompts: float, step: float
) -> tuple[Costs, list[Estimate]]:
    """Costs and estimates.  The best estimate is timed again until it stays the best."""
    depth, again = rounds.depth, set[Shape]()
    rounds.run([(s, d) for s in rounds.variants for d in range(1, depth + 1)], REPEATS)
    while True:
        found = predictions(answers, costs := rounds.costs(prompts, step), depth)
        best = max(found, key=lambda one: one.speed)
        shape = best.siblings, best.depth
        if not best.depth or shape in again:
            return costs, found
        again.add(shape)
        rounds.samples[shape].clear()
        rounds.run([shape], AGAIN)


def _controller(variant: LLM) -> FixedController:
    assert isinstance(variant.engine.controller, FixedController)
    return variant.engine.controller


def _times(llm: LLM, ids: list[int], params: SamplingParams) -> Times:
    """Mean seconds of a step behind a text, by phase."""
    for number, _ in enumerate(llm.stream({"prompt_token_ids": ids}, params)):
        if number == WARM:
            llm.engine.reset()
        if number == WARM + STEPS:
            break
    else:
        raise ConfigError("the model cannot be measured: its answer ends, or fails, after a few tokens.")
    work = llm.engine.decode
    return Times(*(seconds / max(1, work.steps) for seconds in work.times))


def _forward_seconds(drafter: ModelDrafter, tokens: int) -> float:
    """Seconds of the draft's forward over a prompt."""
    pool, step_input = drafter.decoder.pool(tokens), StepInput.of_ids([1] * tokens)
    began = time.perf_counter()
    drafter.decoder.forward(step_input, pool)
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
    """Draft tokens accepted from token `at` on; a depth keeps the `siblings` likeliest nodes."""
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
