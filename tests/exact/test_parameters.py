"""Every sampling parameter with every drafter: tokens, text and log-probabilities of plain decoding.

Each parameter occurs alone. Then a covering array has every pair of (kind of tree, temperature, each
parameter on or off), and each other method one of its rows. With `-m full` every drafter runs at every
temperature with every parameter and every pair of them.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
from covering import covering_array, pairwise
from drafter_cases import DEPTH, DRAFTERS, KINDS, OTHERS, PlainOutputs, use_drafter
from scene import outcome
from torch import Tensor

from outrider import LLM, RequestOutput, SamplingParams
from outrider.testing import KnownTexts, check_idle, random_prompts, run_staggered
from outrider.testing.checkpoints import VOCABULARY

PROMPTS = random_prompts(3, seed=12)
TEMPERATURES = (0.0, 0.8)


# ---- parameters: (plain outputs, the tokens of plain decoding without them) -> keys of SamplingParams


def bad_words(plain: PlainOutputs, tokens: list[int]) -> dict[str, Any]:
    """Pairs of tokens of the plain output whose text encodes to the same tokens, and one token alone."""
    decode, encode = plain.llm.tokenizer.decode, plain.llm.tokenizer.encode
    pairs = [tokens[i : i + 2] for i in range(2, 20)]
    words = [
        decode(pair)
        for pair in pairs
        if encode(decode(pair)) == pair and decode(pair).strip() == decode(pair)
    ]
    return {"bad_words": [*words, decode(tokens[5:6])] if decode(tokens[5:6]).strip() else words}


def logit_bias(plain: PlainOutputs, tokens: list[int]) -> dict[str, Any]:
    return {"logit_bias": {tokens[4]: -100, tokens[9]: -3.5, 30: 6, 31: 5}}


def hop(output: list[int], logits: Tensor) -> Tensor:
    """A processor that depends on the last token and on the number of tokens."""
    logits[(output[-1] * 7 + 1 if output else 3) % VOCABULARY :: 3] -= 5
    logits[len(output) * 11 % VOCABULARY] += 4
    return logits


def echo(prompt: list[int], output: list[int], logits: Tensor) -> Tensor:
    logits[prompt[len(output) % len(prompt)]] += 6
    return logits


def stop_kept(plain: PlainOutputs, tokens: list[int]) -> dict[str, Any]:
    decode = plain.llm.tokenizer.decode
    return {
        "include_stop_str_in_output": True,
        "stop": [t for t in (decode(tokens[i : i + 2]) for i in range(9, 16)) if t.strip()],
    }


def fixed(**keys: Any) -> Callable[[PlainOutputs, list[int]], dict[str, Any]]:
    return lambda plain, tokens: keys


PARAMETERS: dict[str, Callable[[PlainOutputs, list[int]], dict[str, Any]]] = {
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
    "thinking_token_budget": fixed(thinking_token_budget=6, reasoning_markers=("", "</think>")),
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

Case = tuple[str, float, tuple[str, ...]]  # drafter, temperature, names of parameters


def covering_cases() -> list[Case]:
    """Every pair of values of (kind of tree, temperature, each parameter on or off); a row for each other."""
    rows = covering_array([KINDS, TEMPERATURES, *[(False, True)] * len(PARAMETERS)])
    rows += [(name, *row[1:]) for name, row in zip(OTHERS, rows)]
    return [(row[0], row[1], tuple(itertools.compress(PARAMETERS, row[2:]))) for row in rows]


def case_id(case: Case) -> str:
    return f"{case[0]}-{case[1]}-{'+'.join(case[2])}"


def params_of(plain: PlainOutputs, names: tuple[str, ...], number: int, temperature: float) -> SamplingParams:
    """Sampling parameters of a prompt with the named ones set."""
    basic = {"temperature": temperature, "seed": 100 + number, "max_tokens": 24}
    endless = SamplingParams(**basic, ignore_eos=True)
    tokens, keys = plain(PROMPTS[number], endless).outputs[0].token_ids, dict[str, Any]()
    for name in names:
        keys.update(PARAMETERS[name](plain, tokens))
    return SamplingParams(**basic, **keys)


def run(case: Case, plain: PlainOutputs, fast: LLM, random_draft: str) -> list[RequestOutput]:
    """Compare the staggered prompts of a case with plain decoding of each alone; return the latter."""
    drafter, temperature, names = case
    known = KnownTexts()
    params = [params_of(plain, names, i, temperature) for i in range(len(PROMPTS))]
    if drafter.startswith("scripted:"):
        unbounded = {"stop": None, "logprobs": None, "prompt_logprobs": None}
        for prompt, p in zip(PROMPTS, params):
            future = plain(prompt, SamplingParams(**{**vars(p), **unbounded}))
            known.learn(future.prompt_token_ids, p.seed or 0, future.outputs)
    use_drafter(fast, drafter, known, random_draft)
    expected = [plain(prompt, p) for prompt, p in zip(PROMPTS, params)]
    outputs = run_staggered(fast, PROMPTS, params)
    check_idle(fast)
    for mine, theirs in zip(outputs, expected):
        assert mine.error is None and theirs.error is None
        assert outcome(mine) == outcome(theirs)
        assert mine.prompt_token_ids == theirs.prompt_token_ids
        for one, other in zip(mine.outputs, theirs.outputs, strict=True):
            assert one.text == other.text
            assert (one.finish_reason, one.stop_reason) == (other.finish_reason, other.stop_reason)
            assert one.cumulative_logprob == other.cumulative_logprob
    if drafter == "scripted:right":
        assert sum(output.speculation.accepted for output in outputs) >= DEPTH
    return expected


@pairwise(
    drafter=["scripted:right", "scripted:hidden", "draft_model:siblings"],
    name=list(PARAMETERS),
    temperature=TEMPERATURES,
)
def test_one_parameter_has_the_plain_output_and_an_effect(
    drafter: str, name: str, temperature: float, outputs_of: PlainOutputs, fast: LLM, random_draft: str
) -> None:
    """The effect is on the tokens, or on what is returned with them."""
    expected = run((drafter, temperature, (name,)), outputs_of, fast, random_draft)
    without = [
        outputs_of(prompt, params_of(outputs_of, (), i, temperature)) for i, prompt in enumerate(PROMPTS)
    ]
    changed = sum(a.outputs[0].token_ids != b.outputs[0].token_ids for a, b in zip(expected, without))
    assert name in SHOWN or changed > 0, "this parameter does nothing here"


@pytest.mark.parametrize("case", covering_cases(), ids=case_id)
def test_combined_parameters_have_the_plain_output(
    case: Case, outputs_of: PlainOutputs, fast: LLM, random_draft: str
) -> None:
    run(case, outputs_of, fast, random_draft)


@pytest.mark.full
@pytest.mark.parametrize("temperature", TEMPERATURES)
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_every_pair_of_parameters_has_the_plain_output(
    drafter: str, temperature: float, outputs_of: PlainOutputs, fast: LLM, random_draft: str
) -> None:
    names = [*((name,) for name in PARAMETERS), *itertools.combinations(PARAMETERS, 2)]
    for pair in names:
        run((drafter, temperature, pair), outputs_of, fast, random_draft)
