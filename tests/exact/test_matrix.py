"""Every drafter and every adversarial script emits the tokens of plain decoding.

Factors: drafter, temperature, what a request asks for, and one prompt alone or seven that arrive one after
another with some aborted. Every pair of values occurs by default for each kind of tree, and for other methods
with a third of the requests; every combination with `-m full`. Tokens, text, finish_reason and stop_reason
are compared with an engine without drafter that ran each prompt alone. A new method in draft/ is covered
through its `example`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from covering import covering_array, parametrized
from drafter_cases import DEPTH, DRAFTERS, KINDS, OTHERS, SCRIPTS, PlainOutputs, use_drafter
from helpers import answer, eos_replaced

from outrider import LLM, SamplingParams
from outrider.core.step import Batch
from outrider.testing import (
    KnownTexts,
    check_idle,
    check_statistics,
    random_prompts,
    run_staggered,
    visible_parts,
)
from outrider.testing.checkpoints import EOS
from outrider.verify.base import Picker

PROMPTS = random_prompts(7)
TEMPERATURES = (0.0, 0.8)
# These always have some accepted tokens here; the others may be wrong throughout.
ACCEPTING = {f"scripted:{name}" for name in SCRIPTS if name != "wrong"} | {"draft_model", "first", "union"}


# ---- what a request asks for: (plain outputs, number of the prompt, sampling parameters) -> Ask


@dataclass(frozen=True)
class Ask:
    """Parameters of a request.  `endless`: the same without an end, for scripts that learn the text."""

    params: SamplingParams
    endless: SamplingParams
    eos: tuple[int, ...] = (EOS,)


def _endless(number: int, sampling: dict[str, Any], tokens: int = 32) -> SamplingParams:
    return SamplingParams(seed=100 + number, max_tokens=tokens, ignore_eos=True, **sampling)


def basic(plain: PlainOutputs, number: int, sampling: dict[str, Any]) -> Ask:
    params = SamplingParams(seed=100 + number, max_tokens=24, **sampling)
    return Ask(params, _endless(number, sampling))


def nucleus(plain: PlainOutputs, number: int, sampling: dict[str, Any]) -> Ask:
    return basic(plain, number, {**sampling, "top_p": 0.9, "min_p": 0.05})


def top_k(plain: PlainOutputs, number: int, sampling: dict[str, Any]) -> Ask:
    return basic(plain, number, {**sampling, "top_k": 5})


def max_tokens(plain: PlainOutputs, number: int, sampling: dict[str, Any]) -> Ask:
    """Ends in the second step of a correct drafter, inside its accepted path."""
    return Ask(_endless(number, sampling, DEPTH + 4 - number % 4), _endless(number, sampling))


def samples(plain: PlainOutputs, number: int, sampling: dict[str, Any]) -> Ask:
    return basic(plain, number, {**sampling, "n": 3})


def stop_string(plain: PlainOutputs, number: int, sampling: dict[str, Any]) -> Ask:
    """A string across two tokens, at its first occurrence inside the path of the second step."""
    endless, decode = _endless(number, sampling), plain.llm.tokenizer.decode
    tokens = plain(PROMPTS[number], endless).outputs[0].token_ids
    for end in range(DEPTH + 3, 2 * DEPTH + 1):
        stop = decode(tokens[end - 1 : end + 1], skip_special_tokens=True)
        text = decode(tokens[: end + 1], skip_special_tokens=True)
        if len(stop) > 1 and stop.isascii() and text.find(stop) == len(text) - len(stop):
            return Ask(SamplingParams(**{**vars(endless), "stop": [stop, "never emitted"]}), endless)
    raise AssertionError("this text has no string to stop at: choose other prompts")


def _token_in_second_step(plain: PlainOutputs, number: int, endless: SamplingParams) -> int:
    """A token that first occurs in the middle of the second step of a correct drafter."""
    tokens = plain(PROMPTS[number], endless).outputs[0].token_ids
    return next(t for i, t in enumerate(tokens) if i > DEPTH + 1 and t not in tokens[:i])


def stop_id(plain: PlainOutputs, number: int, sampling: dict[str, Any]) -> Ask:
    endless = _endless(number, sampling)
    token = _token_in_second_step(plain, number, endless)
    return Ask(SamplingParams(**{**vars(endless), "stop_token_ids": [token]}), endless)


def eos(plain: PlainOutputs, number: int, sampling: dict[str, Any]) -> Ask:
    """The model's EOS is a token of the first prompt's text."""
    endless = _endless(number, sampling)
    token = _token_in_second_step(plain, 0, _endless(0, sampling))
    return Ask(SamplingParams(**{**vars(endless), "ignore_eos": False}), endless, (EOS, token))


def min_tokens(plain: PlainOutputs, number: int, sampling: dict[str, Any]) -> Ask:
    """Stop ids that would end the text are suppressed up to the tenth token, also inside a path."""
    endless = _endless(number, sampling)
    tokens = plain(PROMPTS[number], endless).outputs[0].token_ids
    keys = {"min_tokens": 10, "stop_token_ids": [tokens[2], tokens[5], tokens[8]]}
    params = SamplingParams(**{**vars(endless), **keys})
    return Ask(params, params)


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
ENDS_INSIDE_A_PATH = (stop_string, stop_id, eos)  # with a correct drafter

FACTORS: dict[str, Any] = {"drafter": DRAFTERS, "temperature": TEMPERATURES, "ask": ASKS}
# Every kind of tree meets all that a request asks for, the other methods a third of it.
TURNS = [(OTHERS[i::3], ASKS[i::3]) for i in range(3)]
ROWS = [
    row
    for drafters, asks in [(KINDS, ASKS), *TURNS]
    for row in covering_array([drafters, TEMPERATURES, asks, ("alone", "staggered")])
]
ENDS = {("scripted:right", temperature, ask) for temperature in TEMPERATURES for ask in ENDS_INSIDE_A_PATH}
alone = parametrized(FACTORS, ENDS | {row[:3] for row in ROWS if row[3] == "alone"})
staggered = parametrized(FACTORS, {row[:3] for row in ROWS if row[3] == "staggered"})


@contextmanager
def emitted_counts(llm: LLM) -> Iterator[list[list[int]]]:
    """Tokens emitted by the rule in each step, before the scheduler clips them."""
    lengths: list[list[int]] = []
    verify = llm.engine.verify

    def recording(batch: Batch, picker: Picker) -> None:
        verify(batch, picker)
        lengths.append([len(step.emitted) for step in batch])

    llm.engine.verify = recording
    try:
        yield lengths
    finally:
        llm.engine.verify = verify


@alone
def test_one_prompt_has_the_plain_output(
    drafter: str,
    temperature: float,
    ask: Callable[..., Ask],
    outputs_of: PlainOutputs,
    fast: LLM,
    random_draft: str,
) -> None:
    """Correct draft tokens are accepted, up to the token that ends the text inside a path."""
    sampling, prompt = {"temperature": temperature}, PROMPTS[0]
    wanted = ask(outputs_of, 0, sampling)
    known = KnownTexts()
    known.learn(prompt, 100, outputs_of(prompt, wanted.endless).outputs)
    use_drafter(fast, drafter, known, random_draft)
    with eos_replaced([fast, outputs_of.llm], wanted.eos), emitted_counts(fast) as steps:
        expected = outputs_of(prompt, wanted.params)
        output = answer(fast, prompt, wanted.params)
    assert visible_parts(output.outputs) == visible_parts(expected.outputs)
    check_statistics(output.outputs)
    check_idle(fast)
    if drafter in ACCEPTING:
        assert output.speculation.accepted > 0
    if drafter in ("scripted:wrong", "off"):
        assert output.speculation.accepted == 0
    if drafter == "scripted:right" and ask in ENDS_INSIDE_A_PATH:
        kept = output.speculation.emitted - sum(sum(step) for step in steps[:-1])
        assert 1 < kept < steps[-1][0], "the end should have been in the middle of an accepted path"
    if ask is min_tokens:
        endless = outputs_of(prompt, _endless(0, sampling))
        assert visible_parts(expected.outputs) != visible_parts(endless.outputs), "nothing was suppressed"


@staggered
def test_staggered_prompts_have_the_plain_output(
    drafter: str,
    temperature: float,
    ask: Callable[..., Ask],
    outputs_of: PlainOutputs,
    fast: LLM,
    random_draft: str,
) -> None:
    """Seven prompts for four seats, two of them aborted; an aborted output is a prefix of the plain one."""
    asks = [ask(outputs_of, i, {"temperature": temperature}) for i in range(len(PROMPTS))]
    known = KnownTexts()
    for i, wanted in enumerate(asks):
        known.learn(PROMPTS[i], 100 + i, outputs_of(PROMPTS[i], wanted.endless).outputs)
    use_drafter(fast, drafter, known, random_draft)
    with eos_replaced([fast, outputs_of.llm], asks[0].eos):
        expected = [outputs_of(prompt, wanted.params) for prompt, wanted in zip(PROMPTS, asks)]
        outputs = run_staggered(fast, PROMPTS, [wanted.params for wanted in asks], aborts={2: 3, 5: 6})
    check_idle(fast)
    aborted = 0
    for one, other in zip(outputs, expected):
        check_statistics(one.outputs)
        for mine, theirs in zip(one.outputs, other.outputs, strict=True):
            if mine.finish_reason == "abort":
                aborted += 1
                assert mine.token_ids == theirs.token_ids[: len(mine.token_ids)]
            else:
                assert visible_parts([mine]) == visible_parts([theirs])
    if drafter == "off":
        assert aborted >= 2
