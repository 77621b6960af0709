"""Bodies as clients of vLLM's and OpenAI's servers send them."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from patience import HANG
from served import Served

from outrider.serve.replicas.relay import Question

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
BODIES: dict[str, dict[str, Any]] = {
    COMPLETIONS: {"prompt": "The future of AI is", "max_tokens": 4, "temperature": 0},
    CHAT: {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4, "temperature": 0},
    "/v1/responses": {"input": "Hello", "max_output_tokens": 4, "temperature": 0},
    "/tokenize": {"prompt": "Hello"},
}


def answered(server: Served, path: str, **more: Any) -> dict[str, Any]:
    answer = server.post(path, {**BODIES[path], **more})
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


@pytest.mark.parametrize("path", BODIES)
def test_null_is_a_field_that_is_left_out(path: str, server: Served) -> None:
    """Also of a field that the server does not know, and where another value has no null."""
    schema = server.get("/openapi.json").json()
    name = schema["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]["$ref"]
    fields = schema["components"]["schemas"][name.rpartition("/")[2]]["properties"].keys()
    nulls = dict.fromkeys([*fields - BODIES[path].keys(), "kv_transfer_params"])
    assert "n" in nulls or path not in (COMPLETIONS, CHAT)
    told, plain = answered(server, path, **nulls), answered(server, path)
    for field in ("choices", "output", "tokens"):
        without_ids = [{**each, "id": ""} if isinstance(each, dict) else each for each in told.get(field, [])]
        expected = [{**each, "id": ""} if isinstance(each, dict) else each for each in plain.get(field, [])]
        assert without_ids == expected
    stream = {"stream": True, "stream_options": {"include_usage": None}}
    if path in (COMPLETIONS, CHAT):
        assert server.post(path, {**BODIES[path], **stream}).status_code == 200
    assert server.post(path, {**BODIES[path], "kv_transfer_params": {"a": 1}}).status_code == 400


def test_defaults_of_vllm_are_accepted(server: Served) -> None:
    more = {"use_beam_search": False, "spaces_between_special_tokens": True}
    chat = {**more, "echo": False, "add_special_tokens": False, "include_reasoning": True}
    for path, given in ((COMPLETIONS, more), (CHAT, chat)):
        assert answered(server, path, **given)["choices"] == answered(server, path)["choices"]
    for field, cure in (("use_beam_search", "best_of"), ("echo", "False"), ("add_special_tokens", "False")):
        error = server.post(CHAT, {**BODIES[CHAT], field: True}).json()["error"]
        assert error["param"] == field and cure in error["message"]


def test_a_field_that_is_needed_may_not_be_null(server: Served) -> None:
    error = server.post(COMPLETIONS, {"prompt": None}).json()["error"]
    assert error["param"] == "prompt" and "required" in error["message"]


@pytest.mark.parametrize("length", [600, 200_000])
def test_a_prompt_that_is_too_long_has_openais_code(length: int, server: Served) -> None:
    """Agents shorten the conversation then."""
    text = "x " * length
    bodies = {COMPLETIONS: {"prompt": text}, CHAT: {"messages": [{"role": "user", "content": text}]}}
    for path, body in bodies.items():
        answer = server.post(path, body)
        assert answer.status_code == 400 and answer.json()["error"]["code"] == "context_length_exceeded"


def test_the_seed_minus_one_is_a_random_one(server: Served) -> None:
    texts = {
        answered(server, COMPLETIONS, seed=-1, temperature=1, max_tokens=30)["choices"][0]["text"]
        for _ in range(4)
    }
    assert len(texts) > 1
    question = Question.of("POST", COMPLETIONS, [], b'{"prompt": "a", "seed": -1}')
    assert json.loads(question.body)["seed"] >= 0, "one that can be repeated"


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_usage_of_every_part_of_a_stream_if_asked_for(path: str, server: Served) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = {**BODIES[path], "stream": True, "stream_options": options, "n": 2, "return_speculation": True}
    lines = server.post(path, body).text.split("\n\n")[:-2]
    *parts, usage, speculation = [json.loads(line[6:]) for line in lines]
    assert not usage["choices"] and speculation["usage"] is None
    counts: list[list[int]] = [[], []]
    for part in parts:
        counts[part["choices"][0]["index"]].append(part["usage"]["completion_tokens"])
        assert part["usage"]["prompt_tokens"] == usage["usage"]["prompt_tokens"]
        assert part["usage"]["total_tokens"] == sum(list(part["usage"].values())[:2])
    assert all(each == sorted(each) for each in counts)
    assert usage["usage"]["completion_tokens"] == counts[0][-1] + counts[1][-1] == 8
    alone = {**body, "stream_options": {"continuous_usage_stats": True}}
    text = server.post(path, alone).text
    assert text.count('"usage":{') == text.count("data: {") - 1, "include_usage is its default"
    off = {**body, "stream_options": {"continuous_usage_stats": True, "include_usage": False}}
    assert '"usage"' not in server.post(path, off).text


def test_top_logprobs_of_zero_need_no_logprobs(server: Served) -> None:
    assert answered(server, CHAT, top_logprobs=0)["choices"][0]["logprobs"] is None
    assert server.post(CHAT, {**BODIES[CHAT], "top_logprobs": 1}).status_code == 400


@pytest.mark.parametrize("method", ["GET", "POST"])
def test_ping_is_health_for_sagemaker(method: str, adaptive: Served) -> None:
    """It needs no key."""
    assert httpx.request(method, f"{adaptive.url}/ping", timeout=HANG).json() == {"status": "ready"}
