"""Every parameter, with every drafter: the same tokens, text and log-probabilities as plain decoding, at any temperature.

Each parameter stands alone once; then a covering set of combinations has every pair of (drafter, temperature, parameters)
somewhere.  OUTRIDER_FULL=1 runs every drafter at every temperature with every parameter and every pair of them.
"""

from __future__ import annotations

import itertools
import os
import random
from collections.abc import Callable
from typing import Any

import pytest
from scene import told
from test_matrix import DEPTH, DRAFTERS, Plain, put_to_work
from torch import Tensor

from outrider import LLM, RequestOutput, SamplingParams
from outrider.testing import KnownTexts, check_idle, random_prompts, run_staggered
from outrider.testing.checkpoints import VOCABULARY

PROMPTS = random_prompts(4, seed=12)
TEMPERATURES = (0.0, 0.8)


@pytest.fixture(scope="module")
def reference(plain: LLM) -> Plain:
    return Plain(plain)


# ---- parameters: (reference, what plain decoding says without them) -> the keys of SamplingParams


def bad_words(reference: Plain, tokens: list[int]) -> dict[str, Any]:
    """Pairs of tokens that would be said, as far as their text is read as these very tokens, and one token alone."""
    decode, encode = reference.llm.tokenizer.decode, reference.llm.tokenizer.encode
    pairs = [tokens[i : i + 2] for i in range(2, 20)]
    words = [
        decode(pair)
        for pair in pairs
        if encode(decode(pair)) == pair and decode(pair).strip() == decode(pair)
    ]
    return {"bad_words": [*words, decode(tokens[5:6])] if decode(tokens[5:6]).strip() else words}


def logit_bias(reference: Plain, tokens: list[int]) -> dict[str, Any]:
    return {"logit_bias": {tokens[4]: -100, tokens[9]: -3.5, 30: 6, 31: 5}}


def hop(output: list[int], logits: Tensor) -> Tensor:
    """What may follow depends on the last token and on how many there are."""
    logits[(output[-1] * 7 + 1 if output else 3) % VOCABULARY :: 3] -= 5
    logits[len(output) * 11 % VOCABULARY] += 4
    return logits


def echo(prompt: list[int], output: list[int], logits: Tensor) -> Tensor:
    logits[prompt[len(output) % len(prompt)]] += 6
    return logits


def stop_kept(reference: Plain, tokens: list[int]) -> dict[str, Any]:
    decode = reference.llm.tokenizer.decode
    return {
        "include_stop_str_in_output": True,
        "stop": [t for t in (decode(tokens[i : i + 2]) for i in range(9, 16)) if t.strip()],
    }


def fixed(**keys: Any) -> Callable[[Plain, list[int]], dict[str, Any]]:
    return lambda reference, tokens: keys


PARAMETERS: dict[str, Callable[[Plain, list[int]], dict[str, Any]]] = {
    "repetition_penalty": fixed(repetition_penalty=1.6),
    "repetition_wanted": fixed(repetition_penalty=0.6),
    "presence_penalty": fixed(presence_penalty=2.0),
    "frequency_penalty": fixed(frequency_penalty=2.0),
    "frequency_wanted": fixed(frequency_penalty=-2.0),
    "logit_bias": logit_bias,
    "allowed_token_ids": fixed(allowed_token_ids=range(3, VOCABULARY, 4)),
    "bad_words": bad_words,
    "logits_processors": fixed(logits_processors=[hop, echo]),
    "min_tokens": fixed(min_tokens=12, stop_token_ids=range(20, 120)),
    "stop_kept": stop_kept,
    "special_tokens": fixed(skip_special_tokens=False, ignore_eos=True),
    "logprobs": fixed(logprobs=3),
    "prompt_logprobs": fixed(prompt_logprobs=2),
    "truncate_prompt_tokens": fixed(truncate_prompt_tokens=7),
    "samples": fixed(n=2),
}
SHOWN = {
    "special_tokens",
    "stop_kept",
    "logprobs",
    "prompt_logprobs",
    "samples",
}  # change no token of the first sample


# ---- combinations

Case = tuple[str, float, tuple[str, ...]]


def covering() -> list[Case]:
    """Cases in which every pair of values of (drafter, temperature, each parameter on or off) occurs; greedy, from a fixed seed."""
    axes: list[tuple[Any, ...]] = [tuple(DRAFTERS), TEMPERATURES, *[(False, True)] * len(PARAMETERS)]
    random_streams = random.Random(0)
    missing = {
        (i, a, j, b) for i, j in itertools.combinations(range(len(axes)), 2) for a in axes[i] for b in axes[j]
    }
    cases: list[Case] = []
    while missing:
        i, a, j, b = min(missing, key=str)  # so that every case is good for something
        tries = [[random_streams.choice(values) for values in axes] for _ in range(60)]
        for row in tries:
            row[i], row[j] = a, b
        best = max(
            tries,
            key=lambda row: sum(
                (i, row[i], j, row[j]) in missing for i, j in itertools.combinations(range(len(axes)), 2)
            ),
        )
        missing -= {(i, best[i], j, best[j]) for i, j in itertools.combinations(range(len(axes)), 2)}
        cases.append((best[0], best[1], tuple(name for name, on in zip(PARAMETERS, best[2:]) if on)))
    return cases


def full() -> list[Case]:
    names = [*((name,) for name in PARAMETERS), *itertools.combinations(PARAMETERS, 2)]
    return list(itertools.product(DRAFTERS, TEMPERATURES, names))


def named(case: Case) -> str:
    return f"{case[0]}-{case[1]}-{'+'.join(case[2])}"


def asked(reference: Plain, names: tuple[str, ...], number: int, temperature: float) -> SamplingParams:
    free = SamplingParams(temperature=temperature, seed=100 + number, max_tokens=24)
    tokens = (
        reference(PROMPTS[number], SamplingParams(**{**vars(free), "ignore_eos": True})).outputs[0].token_ids
    )
    keys: dict[str, Any] = {}
    for name in names:
        keys.update(PARAMETERS[name](reference, tokens))
    return SamplingParams(**{**vars(free), **keys})


def run(case: Case, reference: Plain, fast: LLM, stranger: str) -> list[RequestOutput]:
    """The prompts in ragged traffic; returns what plain decoding said to each alone, once that was found to be the same."""
    drafter, temperature, names = case
    truth = KnownTexts()
    params = [asked(reference, names, i, temperature) for i in range(len(PROMPTS))]
    for prompt, p in zip(PROMPTS, params):  # what would have been said had nothing ended the text
        future = reference(
            prompt, SamplingParams(**{**vars(p), "stop": None, "logprobs": None, "prompt_logprobs": None})
        )
        truth.learn(future.prompt_token_ids, p.seed or 0, future.outputs)
    put_to_work(fast, drafter, truth, stranger)
    expected = [reference(prompt, p) for prompt, p in zip(PROMPTS, params)]
    got = run_staggered(fast, PROMPTS, params)
    check_idle(fast)
    for mine, theirs in zip(got, expected):
        assert mine.error is None and theirs.error is None
        assert told(mine) == told(theirs)
        assert mine.prompt_token_ids == theirs.prompt_token_ids
        for one, other in zip(mine.outputs, theirs.outputs, strict=True):
            assert (one.text, one.finish_reason, one.stop_reason) == (
                other.text,
                other.finish_reason,
                other.stop_reason,
            )
            assert one.cumulative_logprob == other.cumulative_logprob
    if drafter == "scripted:right":
        assert sum(output.speculation.accepted for output in got) >= DEPTH
    return expected


@pytest.mark.parametrize("temperature", TEMPERATURES)
@pytest.mark.parametrize("name", PARAMETERS)
@pytest.mark.parametrize("drafter", ["scripted:right", "scripted:hidden", "draft_model:siblings"])
def test_each(
    drafter: str, name: str, temperature: float, reference: Plain, fast: LLM, stranger: str
) -> None:
    """And each has an effect: on the tokens, or on what is shown of them."""
    expected = run((drafter, temperature, (name,)), reference, fast, stranger)
    nothing = [reference(prompt, asked(reference, (), i, temperature)) for i, prompt in enumerate(PROMPTS)]
    changed = sum(a.outputs[0].token_ids != b.outputs[0].token_ids for a, b in zip(expected, nothing))
    assert name in SHOWN or changed > 0, "this parameter does nothing here"


@pytest.mark.parametrize("case", full() if os.environ.get("OUTRIDER_FULL") == "1" else covering(), ids=named)
def test_together(case: Case, reference: Plain, fast: LLM, stranger: str) -> None:
    run(case, reference, fast, stranger)


def test_every_pair_is_covered() -> None:
    cases = covering()
    assert {(case[0], case[1]) for case in cases} == set(itertools.product(DRAFTERS, TEMPERATURES))
    for one, other in itertools.combinations(PARAMETERS, 2):
        assert {(one in case[2], other in case[2]) for case in cases} == set(
            itertools.product((False, True), repeat=2)
        )
