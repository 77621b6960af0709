"""Log-probabilities of prompts, of all tokens of the vocabulary, and in streams."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from served import Served, forked

from outrider import LLM, ConfigError, SamplingParams

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
BODIES: dict[str, dict[str, Any]] = {
    COMPLETIONS: {"prompt": "The future", "max_tokens": 2, "temperature": 0},
    CHAT: {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 2, "temperature": 0},
}


@pytest.fixture(scope="module")
def generous() -> Iterator[Served]:
    options = ("--max-logprobs", "-1", "--speculative-config", "off", "--max-model-len", "128")
    with forked("builtin", *options) as running:
        yield running


def test_all_log_probabilities_of_a_prompt(generous: Served, llm: LLM) -> None:
    prompt = BODIES[COMPLETIONS]["prompt"]
    (output,) = llm.generate([prompt], SamplingParams(temperature=0, max_tokens=2, prompt_logprobs=-1))
    answer = generous.post(COMPLETIONS, {**BODIES[COMPLETIONS], "prompt_logprobs": -1}).json()
    found, expected = answer["choices"][0]["prompt_logprobs"], output.prompt_logprobs
    assert expected is not None and found[0] is None and len(found) == len(expected) > 1
    for mine, other in zip(found[1:], expected[1:]):
        assert other is not None and len(mine) == len(other) > 1000
        assert {int(token): one["rank"] for token, one in mine.items()} == {
            token: one.rank for token, one in other.items()
        }
    chat = generous.post(CHAT, {**BODIES[CHAT], "prompt_logprobs": -1}).json()["prompt_logprobs"]
    assert chat[0] is None and {len(each) for each in chat[1:]} == {len(found[1])}


def test_all_log_probabilities_of_an_output(generous: Served) -> None:
    answer = generous.post(CHAT, {**BODIES[CHAT], "logprobs": True, "top_logprobs": -1}).json()
    for each in answer["choices"][0]["logprobs"]["content"]:
        best = [one["logprob"] for one in each["top_logprobs"]]
        assert len(best) > 1000 and best == sorted(best, reverse=True)
    answer = generous.post(COMPLETIONS, {**BODIES[COMPLETIONS], "logprobs": 50}).json()
    assert all(len(each) > 20 for each in answer["choices"][0]["logprobs"]["top_logprobs"])


@pytest.mark.parametrize("count", [-1, 21])
@pytest.mark.parametrize(
    ("path", "name"), [(COMPLETIONS, "prompt_logprobs"), (CHAT, "prompt_logprobs"), (CHAT, "top_logprobs")]
)
def test_more_than_the_server_returns_are_refused(path: str, name: str, count: int, server: Served) -> None:
    answer = server.post(path, {**BODIES[path], name: count, **({"logprobs": True} if path == CHAT else {})})
    error = answer.json()["error"]
    assert answer.status_code == 400 and error["param"] == name
    assert "at most 20" in error["message"] and "--max-logprobs -1" in error["message"]


@pytest.mark.parametrize("path", BODIES)
def test_a_stream_has_no_prompt_logprobs(path: str, server: Served) -> None:
    """As in vLLM, which takes 0 for none."""
    answer = server.post(path, {**BODIES[path], "stream": True, "prompt_logprobs": 1})
    error = answer.json()["error"]
    assert answer.status_code == 400 and error["param"] == "prompt_logprobs"
    assert "leave stream out" in error["message"]
    answer = server.post(path, {**BODIES[path], "stream": True, "prompt_logprobs": 0})
    assert answer.status_code == 200 and "prompt_logprobs" not in answer.text


def test_the_offline_api_has_no_limit_to_set() -> None:
    with pytest.raises(ConfigError, match=r"max_logprobs.*leave it out"):
        LLM("builtin", max_logprobs=-1)
