"""Prompts that are scored: echo with logprobs and max_tokens 0 or 1, as lm-evaluation-harness asks."""

from __future__ import annotations

import json
from typing import Any

import pytest
from openai import OpenAI
from served import Served

from outrider import LLM, SamplingParams

COMPLETIONS = "/v1/completions"
PROMPTS = ["The future of AI is", "Once upon a time there was"]
BODY: dict[str, Any] = {"prompt": PROMPTS, "temperature": 0, "logprobs": 1, "echo": True, "seed": 1234}


@pytest.mark.parametrize("as_ids", [False, True])
@pytest.mark.parametrize("most", [0, 1])
def test_the_log_probabilities_of_prompts_are_those_of_the_offline_api(
    most: int, as_ids: bool, server: Served, llm: LLM
) -> None:
    expected = llm.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=1))
    prompts: Any = [output.prompt_token_ids for output in expected] if as_ids else PROMPTS
    answer = server.post(COMPLETIONS, {**BODY, "prompt": prompts, "max_tokens": most}).json()
    for choice, output in zip(answer["choices"], expected, strict=True):
        ids, entries = output.prompt_token_ids, output.prompt_logprobs
        assert entries is not None
        found = choice["logprobs"]
        assert {len(values) for values in found.values()} == {len(ids) + most}
        for i in range(1, len(ids)):
            entry = entries[i]
            assert entry is not None and found["token_logprobs"][i] == entry[ids[i]].logprob
            greedy = found["token_logprobs"][i] == max(found["top_logprobs"][i].values())
            assert greedy == (entry[ids[i]].rank == 1)
    assert answer["usage"]["completion_tokens"] == most * len(PROMPTS)


def test_without_a_new_token_the_text_is_the_prompt(server: Served) -> None:
    body = {**BODY, "max_tokens": 0, "n": 2, "return_token_ids": True, "temperature": 1}
    choices = server.post(COMPLETIONS, body).json()["choices"]
    assert [choice["text"] for choice in choices] == [PROMPTS[0]] * 2 + [PROMPTS[1]] * 2
    assert all(choice["finish_reason"] == "length" and choice["token_ids"] == [] for choice in choices)


def test_a_stream_without_a_new_token_is_that_of_the_prompt(server: Served) -> None:
    body = {**BODY, "max_tokens": 0, "stream": True, "stream_options": {"include_usage": True}}
    lines = server.post(COMPLETIONS, body).text.split("\n\n")
    chunks = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    whole = server.post(COMPLETIONS, {**BODY, "max_tokens": 0}).json()
    for choice in whole["choices"]:
        parts = [one for chunk in chunks for one in chunk["choices"] if one["index"] == choice["index"]]
        assert "".join(part["text"] for part in parts) == choice["text"]
        assert [part["finish_reason"] for part in parts if part["finish_reason"]] == ["length"]
        for name, values in choice["logprobs"].items():
            assert [value for part in parts for value in part["logprobs"][name]] == values
    assert chunks[-1]["usage"]["completion_tokens"] == 0


def test_logprobs_are_not_needed(server: Served) -> None:
    client: OpenAI = server.client()
    (choice,) = client.completions.create(model="builtin", prompt="A b", max_tokens=0, echo=True).choices
    assert (choice.text, choice.logprobs) == ("A b", None)


def test_no_new_token_without_echo_is_refused(server: Served) -> None:
    answer = server.post(COMPLETIONS, {"prompt": "A b", "max_tokens": 0})
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "max_tokens"
    assert "echo" in answer.json()["error"]["message"]


def test_no_new_token_and_a_least_number_of_them_exclude_each_other(server: Served) -> None:
    for least in (1, 3):
        answer = server.post(COMPLETIONS, {**BODY, "max_tokens": 0, "min_tokens": least})
        error = answer.json()["error"]
        assert answer.status_code == 400 and error["param"] == "min_tokens"
        assert error["message"] == f"min_tokens must be at most max_tokens (0), got {least}."
    assert server.post(COMPLETIONS, {**BODY, "max_tokens": 0, "min_tokens": 0}).status_code == 200
