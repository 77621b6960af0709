"""Every drafter, and scripts that are out to confuse, say token for token what plain decoding says.

Drafter × temperature × what the request asks for × one prompt alone or seven ragged ones that join and abort midway.
Compared are tokens, text, finish_reason and stop_reason with those of an engine without drafter that ran each prompt
alone.  A method in draft/ is covered the moment it exists, through its `example`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
from helpers import answer, eos_replaced

from outrider import LLM, RequestOutput, SamplingParams, draft
from outrider.core.types import Batch, Picker
from outrider.testing import (
    KnownTexts,
    Scripts,
    check_idle,
    check_statistics,
    random_prompts,
    run_staggered,
    use_example,
    visible_parts,
)
from outrider.testing.checkpoints import EOS

PROMPTS = random_prompts(7)
SCRIPTS = ("right", "wrong", "wide", "deep", "hidden", "huge", "messy")
LUCKY = {f"scripted:{name}" for name in SCRIPTS if name != "wrong"} | {
    "draft_model",
    "first",
    "union",
}  # cannot be always wrong
KINDS: dict[str, dict[str, Any]] = {
    "chain": {},
    "siblings": {"siblings": 3},
    "window": {"draft_kv_budget": 6, "draft_kv_sink": 2},
    "self": {"model": "self", "draft_kv_budget": 12},
    "stops": {
        "siblings": 2, "assistant_confidence_threshold": 0.2, "assistant_confidence_schedule": "refit", "entropy_threshold": 0.3,
        "num_assistant_tokens_schedule": "heuristic_transient", "num_assistant_tokens": 3,
    },
    "staged": {"drafter": {"method": "recycle", "min_token_prob": 0.0}},
}  # fmt: skip
DRAFTERS = [
    *draft.names(),
    *(f"scripted:{name}" for name in SCRIPTS),
    *(f"draft_model:{kind}" for kind in KINDS),
]
DEPTH = 6


class Plain:
    """Answers of plain decoding, each prompt alone; remembered."""

    def __init__(self, llm: LLM) -> None:
        self.llm, self.known = llm, {}

    def __call__(self, prompt: list[int], params: SamplingParams) -> RequestOutput:
        key = tuple(prompt), params, self.llm.engine.ending
        if key not in self.known:
            self.known[key] = answer(self.llm, prompt, params)
        return self.known[key]


@pytest.fixture(scope="module")
def reference(plain: LLM) -> Plain:
    return Plain(plain)


# ---- what a request may ask for: (reference, prompt, its number, law) -> (params, the params that tell its future, EOS ids)


@dataclass(frozen=True)
class Ask:
    """`free` are params under which plain decoding says what would come, had the text not ended."""

    params: SamplingParams
    free: SamplingParams
    eos: tuple[int, ...] = (EOS,)


def _free(number: int, distribution: dict[str, Any], tokens: int = 32) -> SamplingParams:
    return SamplingParams(seed=100 + number, max_tokens=tokens, ignore_eos=True, **distribution)


def basic(reference: Plain, number: int, distribution: dict[str, Any]) -> Ask:
    return Ask(SamplingParams(seed=100 + number, max_tokens=24, **distribution), _free(number, distribution))


def nucleus(reference: Plain, number: int, distribution: dict[str, Any]) -> Ask:
    return basic(reference, number, {**distribution, "top_p": 0.9, "min_p": 0.05})


def top_k(reference: Plain, number: int, distribution: dict[str, Any]) -> Ask:
    return basic(reference, number, {**distribution, "top_k": 5})


def max_tokens(reference: Plain, number: int, distribution: dict[str, Any]) -> Ask:
    """Ends in the second step of a drafter that is right, before its path would."""
    return Ask(_free(number, distribution, DEPTH + 4 - number % 4), _free(number, distribution))


def samples(reference: Plain, number: int, distribution: dict[str, Any]) -> Ask:
    return basic(reference, number, {**distribution, "n": 3})


def stop_string(reference: Plain, number: int, distribution: dict[str, Any]) -> Ask:
    """A string across two tokens, the first of its kind, that a path of the second step walks over."""
    free = _free(number, distribution)
    tokens, decode = reference(PROMPTS[number], free).outputs[0].token_ids, reference.llm.tokenizer.decode
    for end in range(DEPTH + 3, 2 * DEPTH + 1):
        stop, text = (
            decode(part, skip_special_tokens=True) for part in (tokens[end - 1 : end + 1], tokens[: end + 1])
        )
        if len(stop) > 1 and stop.isascii() and text.find(stop) == len(text) - len(stop):
            return Ask(SamplingParams(**{**vars(free), "stop": [stop, "never said"]}), free)
    raise AssertionError("this text has no string to stop at: choose other prompts")


def _early(reference: Plain, number: int, free: SamplingParams) -> int:
    """A token that is first said in the middle of the second step of a drafter that is right."""
    tokens = reference(PROMPTS[number], free).outputs[0].token_ids
    return next(t for i, t in enumerate(tokens) if i > DEPTH + 1 and t not in tokens[:i])


def stop_id(reference: Plain, number: int, distribution: dict[str, Any]) -> Ask:
    free = _free(number, distribution)
    return Ask(SamplingParams(**{**vars(free), "stop_token_ids": [_early(reference, number, free)]}), free)


def eos(reference: Plain, number: int, distribution: dict[str, Any]) -> Ask:
    """The first prompt's text decides which token is the model's EOS."""
    free = _free(number, distribution)
    return Ask(
        SamplingParams(**{**vars(free), "ignore_eos": False}),
        free,
        (EOS, _early(reference, 0, _free(0, distribution))),
    )


def min_tokens(reference: Plain, number: int, distribution: dict[str, Any]) -> Ask:
    """Tokens that want to be said early end the text, and may only from the tenth token on, in the middle of a path."""
    tokens = reference(PROMPTS[number], _free(number, distribution)).outputs[0].token_ids
    params = {
        **vars(_free(number, distribution)),
        "min_tokens": 10,
        "stop_token_ids": [tokens[2], tokens[5], tokens[8]],
    }
    return Ask(SamplingParams(**params), SamplingParams(**params))


ASKS: tuple[Callable[..., Ask], ...] = (
    basic,
    nucleus,
    top_k,
    max_tokens,
    samples,
    stop_string,
    stop_id,
    eos,
    min_tokens,
)
INSIDE = (stop_string, stop_id, eos)  # end in the middle of an accepted path, if the drafter is right


# ---- drafters


def put_to_work(llm: LLM, drafter: str, truth: KnownTexts, checkpoint: str) -> None:
    name, _, kind = drafter.partition(":")
    if name == "scripted" and kind:
        script = getattr(Scripts(truth), kind)
        llm.use(
            {
                "method": name,
                "script": script,
                "nodes": 110,
                "num_speculative_tokens": 20 if kind == "deep" else DEPTH,
            }
        )
    elif kind:
        llm.use({"method": name, "model": checkpoint, "num_speculative_tokens": 4, **KINDS[kind]})
    else:
        use_example(llm, name)


@contextmanager
def overheard(llm: LLM) -> Iterator[list[list[int]]]:
    """How many tokens each step's verifier gave the first row, before the scheduler cut what lies past the end."""
    lengths: list[list[int]] = []
    verify = llm.engine.verify

    def listening(batch: Batch, picker: Picker) -> None:
        verify(batch, picker)
        lengths.append([len(step.emitted) for step in batch])

    llm.engine.verify = listening
    try:
        yield lengths
    finally:
        llm.engine.verify = verify


@pytest.mark.parametrize("ask", ASKS, ids=lambda ask: ask.__name__)
@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_alone(
    drafter: str, temperature: float, ask: Callable[..., Ask], reference: Plain, fast: LLM, stranger: str
) -> None:
    """One prompt; and what should have been accepted was, up to the very token that ends the text inside a path."""
    distribution, number = {"temperature": temperature}, 0
    want = ask(reference, number, distribution)
    truth = KnownTexts()
    truth.learn(PROMPTS[number], 100 + number, reference(PROMPTS[number], want.free).outputs)
    put_to_work(fast, drafter, truth, stranger)
    with eos_replaced([fast, reference.llm], want.eos), overheard(fast) as steps:
        expected = reference(PROMPTS[number], want.params)
        got = answer(fast, PROMPTS[number], want.params)
    assert visible_parts(got.outputs) == visible_parts(expected.outputs)
    check_statistics(got.outputs)
    check_idle(fast)
    if drafter in LUCKY:
        assert got.speculation.accepted > 0
    if drafter in ("scripted:wrong", "off"):
        assert got.speculation.accepted == 0
    if drafter == "scripted:right" and ask in INSIDE:
        kept = got.speculation.emitted - sum(sum(step) for step in steps[:-1])
        assert 1 < kept < steps[-1][0], "the end should have been in the middle of an accepted path"
    if ask is min_tokens:
        assert visible_parts(expected.outputs) != visible_parts(
            reference(PROMPTS[number], _free(number, distribution)).outputs
        ), "nothing was forbidden"


@pytest.mark.parametrize("ask", ASKS, ids=lambda ask: ask.__name__)
@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_in_company(
    drafter: str, temperature: float, ask: Callable[..., Ask], reference: Plain, fast: LLM, stranger: str
) -> None:
    """Seven prompts for four seats; one joins every other step, two are aborted.  What an aborted one has said is a beginning."""
    distribution = {"temperature": temperature}
    wants = [ask(reference, i, distribution) for i in range(len(PROMPTS))]
    truth = KnownTexts()
    for i, want in enumerate(wants):
        truth.learn(PROMPTS[i], 100 + i, reference(PROMPTS[i], want.free).outputs)
    put_to_work(fast, drafter, truth, stranger)
    with eos_replaced([fast, reference.llm], wants[0].eos):
        expected = [reference(prompt, want.params) for prompt, want in zip(PROMPTS, wants)]
        got = run_staggered(fast, PROMPTS, [want.params for want in wants], aborts={2: 3, 5: 6})
    check_idle(fast)
    aborted = 0
    for one, other in zip(got, expected):
        check_statistics(one.outputs)
        for mine, theirs in zip(one.outputs, other.outputs, strict=True):
            if mine.finish_reason == "abort":
                aborted += 1
                assert mine.token_ids == theirs.token_ids[: len(mine.token_ids)]
            else:
                assert visible_parts([mine]) == visible_parts([theirs])
    if drafter == "off":
        assert aborted >= 2
