"""Parameters of requests: bad values are refused by name, good ones are normalised."""

from __future__ import annotations

import pickle
from typing import Any

import pytest

from outrider import RequestError, SamplingParams
from outrider.core.params import COLDEST, HOTTEST, DistributionParams


@pytest.mark.parametrize(
    "given",
    [
        {"n": 0},
        {"n": 1.5},
        {"n": True},
        {"temperature": -0.1},
        {"temperature": -1e-9},
        {"temperature": float("nan")},
        {"temperature": float("inf")},
        {"temperature": "1"},
        {"top_p": 0},
        {"top_p": 1.1},
        {"top_p": float("nan")},
        {"top_k": -2},
        {"top_k": 1.0},
        {"min_p": -0.1},
        {"min_p": 1.5},
        {"seed": 1.5},
        {"seed": "x"},
        {"max_tokens": 0},
        {"max_tokens": -1},
        {"max_tokens": 2.0},
        {"min_tokens": -1},
        {"min_tokens": 17},
        {"min_tokens": None},
        {"stop": ""},
        {"stop": ["a", ""]},
        {"stop": [1]},
        {"stop": 5},
        {"stop_token_ids": ["a"]},
        {"stop_token_ids": [1.5]},
        {"stop_token_ids": 5},
        {"ignore_eos": 1},
        {"speculate": "no"},
    ],
    ids=str,
)
def test_a_parameter_out_of_range_is_refused_by_name_and_value(given: dict[str, Any]) -> None:
    ((name, value),) = given.items()
    with pytest.raises(RequestError) as caught:
        SamplingParams(**given)
    assert name in str(caught.value) and repr(value).strip("()[]") in str(caught.value)
    assert caught.value.param == pickle.loads(pickle.dumps(caught.value)).param == name


@pytest.mark.parametrize(
    ("wrong", "right"), [("temprature", "temperature"), ("topk", "top_k"), ("max_new_tokens", "max_tokens")]
)
def test_an_unknown_parameter_is_refused_with_the_nearest(wrong: str, right: str) -> None:
    with pytest.raises(RequestError, match=f"{wrong}.*Did you mean '{right}'"):
        SamplingParams(**{wrong: 1})


@pytest.mark.parametrize(
    ("wrong", "cure"),
    [
        ("best_of", "n samples"),
        ("suffix", "not filled in"),
        ("guided_json", "structured_outputs"),
        ("use_beam_search", "Beam search"),
        ("priority", "argument of LLM.generate"),
        ("spaces_between_special_tokens", "leave it out"),
    ],
)
def test_a_parameter_of_another_program_is_refused_with_what_serves_here(wrong: str, cure: str) -> None:
    with pytest.raises(RequestError) as caught:
        SamplingParams(**{wrong: 2})
    output = str(caught.value)
    assert wrong in output and cure in output and "Did you mean" not in output


def test_parameters_are_normalised_and_frozen() -> None:
    params = SamplingParams(stop="x", top_k=-1, temperature=1, seed=-1)
    assert params.seed is None
    assert (
        params.stop == ("x",)
        and params.top_k == 0
        and params.distribution == DistributionParams(1.0, 0.0, 0, 1.0)
    )
    assert isinstance(params.distribution.temperature, float)
    assert SamplingParams(max_tokens=None, min_tokens=50).min_tokens == 50
    with pytest.raises(AttributeError):
        params.top_k = 5  # type: ignore[misc]


@pytest.mark.parametrize(
    "given",
    [
        {"repetition_penalty": 0},
        {"repetition_penalty": -1.0},
        {"repetition_penalty": float("inf")},
        {"repetition_penalty": "1"},
        {"presence_penalty": 2.1},
        {"presence_penalty": -3},
        {"presence_penalty": float("nan")},
        {"presence_penalty": None},
        {"frequency_penalty": 2.5},
        {"frequency_penalty": True},
        {"logit_bias": [1, 2]},
        {"logit_bias": {"a": 1}},
        {"logit_bias": {1.5: 1}},
        {"logit_bias": {1: "x"}},
        {"logit_bias": {1: float("nan")}},
        {"allowed_token_ids": []},
        {"allowed_token_ids": 5},
        {"allowed_token_ids": ["a"]},
        {"allowed_token_ids": "12"},
        {"bad_words": "word"},
        {"bad_words": ["a", ""]},
        {"bad_words": [5]},
        {"logits_processors": [5]},
        pytest.param({"logits_processors": print}, id="no list"),
        {"logprobs": -2},
        {"logprobs": 1.0},
        {"prompt_logprobs": -5},
        {"prompt_logprobs": "all"},
        {"truncate_prompt_tokens": 0},
        {"truncate_prompt_tokens": -2},
        {"truncate_prompt_tokens": 1.5},
        {"include_stop_str_in_output": 1},
        {"skip_special_tokens": None},
        {"detokenize": "no"},
    ],
    ids=str,
)
def test_a_bad_value_is_refused_by_name(given: dict[str, Any]) -> None:
    ((name, _),) = given.items()
    with pytest.raises(RequestError, match=rf"^{name} must") as caught:
        SamplingParams(**given)
    assert caught.value.param == name


@pytest.mark.parametrize(
    ("given", "used"), [(0, 0), (1e-3, 1e-3), (5e-324, COLDEST), (1e-20, 1e-20), (1e300, HOTTEST)]
)
def test_every_temperature_has_a_reciprocal_in_float32(given: float, used: float) -> None:
    params = SamplingParams(temperature=given)
    assert (params.temperature, params.distribution.temperature) == (given, used)


def test_stop_strings_need_text() -> None:
    with pytest.raises(RequestError, match="detokenize"):
        SamplingParams(stop="x", detokenize=False)


def test_values_are_normalised() -> None:
    params = SamplingParams(
        logit_bias={"3": 500, 4: -0.5},
        allowed_token_ids={5},
        bad_words=["a"],
        logprobs=True,
        prompt_logprobs=-1,
    )
    assert (
        params.logit_bias == {3: 100.0, 4: -0.5}
        and params.allowed_token_ids == (5,)
        and params.bad_words == ("a",)
    )
    assert params.logprobs == 1 and params.prompt_logprobs == -1
    assert SamplingParams(**vars(params)) == params and hash(SamplingParams(**vars(params))) == hash(params)
    assert SamplingParams(logit_bias={3: 1}) != SamplingParams(logit_bias={3: 2})
