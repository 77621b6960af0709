"""`best_of` of completions: the likeliest of several samples, chosen by the server."""

from __future__ import annotations

from typing import Any

import pytest
from served import Served

from outrider import LLM, SamplingParams
from outrider.outputs import CompletionOutput

PROMPTS = ["The future of AI is", "Once upon a time"]
BODY: dict[str, Any] = {"prompt": PROMPTS, "max_tokens": 12, "temperature": 1.2, "seed": 5, "stop": ["."]}


def per_token(sample: CompletionOutput) -> float:
    assert sample.cumulative_logprob is not None
    return sample.cumulative_logprob / len(sample.token_ids)


def test_the_likeliest_samples_are_returned_best_first(server: Served, llm: LLM) -> None:
    params = SamplingParams(n=6, max_tokens=12, temperature=1.2, seed=5, stop=["."], logprobs=0)
    outputs = llm.generate(PROMPTS, params)
    expected = [
        sample.text
        for output in outputs
        for sample in sorted(output.outputs, key=per_token, reverse=True)[:2]
    ]
    answer = server.post("/v1/completions", {**BODY, "n": 2, "best_of": 6}).json()
    assert [choice["text"] for choice in answer["choices"]] == expected
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    assert all(choice["logprobs"] is None for choice in answer["choices"])
    emitted = sum(len(sample.token_ids) for output in outputs for sample in output.outputs)
    assert answer["usage"]["completion_tokens"] == emitted, "all samples cost time"


def test_log_probabilities_and_ids_are_those_of_the_samples(server: Served) -> None:
    asked = {
        **BODY,
        "prompt": PROMPTS[0],
        "best_of": 4,
        "logprobs": 1,
        "echo": True,
        "return_token_ids": True,
    }
    (choice,) = server.post("/v1/completions", asked).json()["choices"]
    assert len(choice["logprobs"]["tokens"]) == len(choice["prompt_token_ids"]) + len(choice["token_ids"])
    assert choice["text"].startswith(PROMPTS[0])


@pytest.mark.parametrize(
    ("more", "text"),
    [
        ({"n": 3, "best_of": 2}, "best_of must be at least n (3), got 2"),
        ({"best_of": 2, "stream": True}, "stream"),
        ({"best_of": 0}, "best_of"),
        ({"best_of": 129}, "best_of"),
        ({"best_of": "2"}, "best_of"),
    ],
)
def test_another_best_of_is_refused(more: Any, text: str, server: Served) -> None:
    answer = server.post("/v1/completions", {**BODY, **more})
    error = answer.json()["error"]
    assert answer.status_code == 400 and error["param"] == "best_of" and text in error["message"]


def test_a_stream_may_have_as_many_as_are_returned(server: Served) -> None:
    assert server.post("/v1/completions", {**BODY, "n": 2, "best_of": 2, "stream": True}).status_code == 200
