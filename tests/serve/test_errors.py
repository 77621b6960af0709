"""Anything is wrong with a request, the answer is an error in OpenAI's shape, and the server goes on."""

from __future__ import annotations

import json
from typing import Any

import httpx
import openai
import pytest
from patience import HANG
from served import Served

CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
NO = {"type": "array", "items": {"not": {}}}  # a schema that is refused
HELLO = [{"role": "user", "content": "Hello"}]


def refused(answer: httpx.Response, status: int, text: str = "") -> dict[str, Any]:
    assert answer.status_code == status, answer.text
    assert set(answer.json()) == {"error"}
    error: dict[str, Any] = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"} and error["message"]
    assert text in error["message"], error
    return error


@pytest.mark.parametrize(
    ("path", "body", "text"),
    [
        (COMPLETIONS, {}, "prompt: Field required"),
        (COMPLETIONS, {"prompt": []}, "prompt"),
        (COMPLETIONS, {"prompt": ""}, "the prompt is empty"),
        (COMPLETIONS, {"prompt": [[]]}, "prompt"),
        (COMPLETIONS, {"prompt": [10**9]}, "does not exist"),
        (COMPLETIONS, {"prompt": [-1]}, "prompt"),
        (COMPLETIONS, {"prompt": [1, "a"]}, "prompt"),
        (COMPLETIONS, {"prompt": {"a": 1}}, "prompt"),
        (COMPLETIONS, {"prompt": "x " * 600}, "the context holds 512"),
        (COMPLETIONS, {"prompt": "\ud800"}, ""),
        (COMPLETIONS, {"prompt": "a", "n": 0}, "n"),
        (COMPLETIONS, {"prompt": "a", "n": 1000}, "n"),
        (COMPLETIONS, {"prompt": ["a"] * 200, "n": 2}, "256 samples at most"),
        (COMPLETIONS, {"prompt": "a", "n": 3, "best_of": 2}, "best_of"),
        (COMPLETIONS, {"prompt": "a", "suffix": "b"}, "suffix"),
        (COMPLETIONS, {"prompt": "a", "temperature": "hot"}, "temperature"),
        (COMPLETIONS, {"prompt": "a", "temperature": -1}, "temperature"),
        (COMPLETIONS, {"prompt": "a", "top_p": 0}, "top_p"),
        (COMPLETIONS, {"prompt": "a", "max_tokens": 0}, "max_tokens"),
        (COMPLETIONS, {"prompt": "a", "min_tokens": 99}, "min_tokens"),
        (COMPLETIONS, {"prompt": "a", "logprobs": 99}, "logprobs"),
        (COMPLETIONS, {"prompt": "a", "logit_bias": {"x": 1}}, "logit_bias"),
        (COMPLETIONS, {"prompt": "a", "logit_bias": {"99999999": 1}}, "logit_bias"),
        (COMPLETIONS, {"prompt": "a", "logit_bias": {"\u0665": 1}}, "logit_bias must have token ids as keys"),
        (
            COMPLETIONS,
            {"prompt": "a", "guided_json": "null"},
            "guided_json: structured_outputs: json is no JSON",
        ),
        (COMPLETIONS, {"prompt": "a", "stop": [""]}, "stop"),
        (COMPLETIONS, {"prompt": "a", "stop_token_ids": [1 << 70]}, "stop_token_ids"),
        (COMPLETIONS, {"prompt": "a", "use_beam_search": True}, "use_beam_search"),
        (COMPLETIONS, {"prompt": "a", "speculation": {"method": "x"}}, "method"),
        (COMPLETIONS, {"prompt": "a", "response_format": {"type": "xml"}}, "response_format"),
        (COMPLETIONS, {"prompt": "a", "response_format": {"type": "json_schema"}}, "json_schema"),
        (
            COMPLETIONS,
            {"prompt": "a", "guided_regex": "a", "guided_choice": ["b"]},
            "only one constraint on the output can be given, got guided_regex and guided_choice.",
        ),
        (CHAT, {"messages": []}, "messages"),
        (CHAT, {"messages": "Hello"}, "messages"),
        (CHAT, {"messages": [{}]}, "role"),
        (CHAT, {"messages": [{"role": "user"}]}, "content"),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "content"),
        (CHAT, {"messages": [{"role": "user", "content": "a", "tool_calls": 5}]}, "must be a list, got 5"),
        (CHAT, {"messages": HELLO, "top_logprobs": 3}, "logprobs"),
        (CHAT, {"messages": HELLO, "tools": [{"type": "x"}]}, "tool 0"),
        (CHAT, {"messages": HELLO, "tool_choice": "required"}, "tool_choice"),
        (CHAT, {"messages": HELLO, "tool_choice": "maybe"}, "tool_choice"),
        (CHAT, {"messages": HELLO, "tool_choice": 5}, "tool_choice: Input should be"),
        (CHAT, {"messages": HELLO, "chat_template": "{{ 1 }}"}, "--trust-request-chat-template"),
        (CHAT, {"messages": HELLO, "chat_template_kwargs": {"tokenize": True}}, "'tokenize' is no variable"),
        (
            RESPONSES,
            {"input": "a", "tools": [{"type": "function"}]},
            'tool 0 must be {"type": "function", "name"',
        ),
        (COMPLETIONS, {"prompt": "a", "prediction": {"type": "content", "content": [3]}}, "prediction"),
        (COMPLETIONS, {"prompt": "a", "prediction": "text"}, "prediction"),
        (COMPLETIONS, {"prompt": "a", "logit_bias": {"5": "x", "6": "y"}}, "logit_bias"),
        (RESPONSES, {"input": "a", "truncation": "maybe"}, "truncation"),
        (RESPONSES, {"input": "a", "reasoning": {"effort": ["low"]}}, "reasoning.effort must be a text"),
        ("/tokenize", {"messages": [{"role": "user", "content": "a", "tool_calls": 5}]}, ""),
        (CHAT, {"messages": HELLO, "continue_final_message": True}, "add_generation_prompt"),
        ("/tokenize", {}, "prompt or messages"),
        ("/tokenize", {"prompt": [1, 2]}, "prompt: Input should be a valid string, got [1, 2]"),
        ("/tokenize", {"prompt": "\udfff"}, ""),
        ("/detokenize", {"tokens": [10**7]}, "token id"),
        ("/detokenize", {"tokens": "a"}, "tokens"),
        ("/v1/embeddings", {"input": "a"}, "embeddings"),
    ],
)
def test_a_wrong_value_is_named(path: str, body: Any, text: str, server: Served) -> None:
    refused(httpx.post(server.url + path, content=json.dumps(body), headers=JSON, timeout=HANG), 400, text)


JSON = {"Content-Type": "application/json"}
USER = {"role": "user", "content": "a"}
FUNCTION: dict[str, Any] = {"name": "f", "parameters": NO}


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (COMPLETIONS, {"prompt": ""}, "prompt"),
        (COMPLETIONS, {"prompt": [10**9]}, "prompt"),
        (COMPLETIONS, {"prompt": "x " * 600}, "prompt"),
        (COMPLETIONS, {"prompt": "x" * 200_000}, "prompt"),
        (COMPLETIONS, {"prompt": "\ud800"}, "prompt"),
        (COMPLETIONS, {"prompt": "a", "min_tokens": 99}, "min_tokens"),
        (COMPLETIONS, {"prompt": "a", "logit_bias": {"x": 1}}, "logit_bias"),
        (COMPLETIONS, {"prompt": "a", "logit_bias": {"5": "x"}}, "logit_bias"),
        (COMPLETIONS, {"prompt": "a", "logit_bias": {"99999999": 1}}, "logit_bias"),
        (COMPLETIONS, {"prompt": "a", "stop_token_ids": [1 << 70]}, "stop_token_ids"),
        (COMPLETIONS, {"prompt": "a", "allowed_token_ids": []}, "allowed_token_ids"),
        (COMPLETIONS, {"prompt": "a", "allowed_token_ids": [99999999]}, "allowed_token_ids"),
        (COMPLETIONS, {"prompt": "a", "bad_words": [" "]}, "bad_words"),
        (COMPLETIONS, {"prompt": "a", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        (COMPLETIONS, {"prompt": "a", "speculation": {"method": "x"}}, "speculation.method"),
        (COMPLETIONS, {"prompt": ["a"] * 200, "n": 2}, "n"),
        (COMPLETIONS, {"prompt": "a", "guided_regex": "a("}, "guided_regex"),
        (COMPLETIONS, {"prompt": "a", "guided_choice": []}, "guided_choice"),
        (COMPLETIONS, {"prompt": "a", "structured_outputs": {}}, "structured_outputs"),
        (COMPLETIONS, {"prompt": "a", "structured_outputs": {"regexp": "a"}}, "structured_outputs"),
        (COMPLETIONS, {"prompt": "a", "structured_outputs": {"choice": []}}, "structured_outputs.choice"),
        (CHAT, {"messages": [USER, {}]}, "messages.1.role"),
        (CHAT, {"messages": [USER, {"role": "user"}]}, "messages.1.content"),
        (CHAT, {"messages": [{**USER, "tool_calls": [5]}]}, "messages.0.tool_calls"),
        (CHAT, {"messages": [{**USER, "content": "x " * 600}]}, "messages"),
        (CHAT, {"messages": HELLO, "continue_final_message": True}, "continue_final_message"),
        (CHAT, {"messages": HELLO, "max_tokens": 3, "min_tokens": 4}, "min_tokens"),
        (CHAT, {"messages": HELLO, "allowed_token_ids": []}, "allowed_token_ids"),
        (
            CHAT,
            {"messages": HELLO, "response_format": {"type": "json_schema", "json_schema": {"schema": NO}}},
            "response_format",
        ),
        (
            CHAT,
            {
                "messages": HELLO,
                "tool_choice": "required",
                "tools": [{"type": "function", "function": FUNCTION}],
            },
            "tools",
        ),
        (RESPONSES, {"input": "x " * 600}, "input"),
        (RESPONSES, {"input": [USER, {"role": 5, "content": "a"}]}, "input"),
        (RESPONSES, {"input": "a", "text": {"format": {"type": "json_schema", "schema": NO}}}, "text.format"),
        (RESPONSES, {"input": "a", "allowed_token_ids": []}, "allowed_token_ids"),
        ("/tokenize", {"prompt": "\udfff"}, "prompt"),
        ("/tokenize", {"messages": [USER, {"role": "user"}]}, "messages.1.content"),
    ],
)
def test_the_field_at_fault_is_the_param_of_the_error(
    path: str, body: dict[str, Any], param: str, server: Served
) -> None:
    """Streams, too, have the status of an error that is known before the first token."""
    streams = [{}, {"stream": True}] if path in (COMPLETIONS, CHAT, RESPONSES) else [{}]
    for stream in streams:
        content = json.dumps({**body, **stream})
        answer = httpx.post(server.url + path, content=content, headers=JSON, timeout=HANG)
        assert refused(answer, 400)["param"] == param, answer.text


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b'"a"',
        b"\xff\xfe",
        b"[" * 50_000,
        b'{"prompt": NaN}',
        b"1" * 5_000,
        b"{'a': 1}",
        b'{"prompt": ' + b"[" * 50_000,
        b'{"prompt": "\xff"}',
    ],
)
def test_bodies_that_are_no_json_object_are_refused(content: bytes, server: Served) -> None:
    for path in (COMPLETIONS, CHAT, "/tokenize"):
        refused(httpx.post(server.url + path, content=content, headers=JSON, timeout=HANG), 400)


def test_numbers_must_be_finite_and_the_field_of_a_union_is_named(server: Served) -> None:
    for number in ("NaN", "-Infinity", "1e999"):
        content = f'{{"prompt": "a", "guided_json": {{"const": {number}}}}}'
        answer = httpx.post(server.url + COMPLETIONS, content=content, headers=JSON, timeout=HANG)
        refused(answer, 400, f"{number} is no finite number")
    for prompt in (5, [], [[]], [1.5], ["a"] * 1025):
        error = refused(server.post(COMPLETIONS, {"prompt": prompt}), 400, "a text, a list of token ids, or")
        assert error["param"] == "prompt" and ", got " in error["message"]


def test_a_body_without_the_type_of_json(server: Served) -> None:
    """As `curl -d` sends it."""
    refused(
        httpx.post(server.url + COMPLETIONS, content=b'{"prompt": "a"}', timeout=HANG),
        400,
        "Content-Type: application/json",
    )
    form = {"Content-Type": "application/x-www-form-urlencoded"}
    refused(
        httpx.post(server.url + COMPLETIONS, content=b'{"prompt": "a"}', headers=form, timeout=HANG),
        400,
        "Content-Type",
    )
    text = refused(
        httpx.post(server.url + COMPLETIONS, content=b'{"prompt": "\xff"}', headers=JSON, timeout=HANG), 400
    )
    assert text["code"] == "invalid_json" and "0xff" in text["message"]


def test_other_faults_have_their_status(server: Served) -> None:
    assert refused(server.post(COMPLETIONS, {"prompt": "a", "model": "no"}), 404)["code"] == "model_not_found"
    refused(server.get("/v1/models/no"), 404)
    refused(server.get("/v1/nothing"), 404)
    refused(server.post("/v1/unknown", {}), 404, "no route /v1/unknown: see /openapi.json")
    for path in ("/v1/audio/speech", "/score", "/v1/rerank", "/v2/rerank", "/pooling", "/v1/images/edits"):
        refused(
            server.post(path, {}), 404, f"no route {path}: it is not supported: the server generates text"
        )
    reasons = {
        "/sleep": "stop the server",
        "/reset_prefix_cache": "cache_salt",
        "/v1/responses/x/cancel": "not stored",
        "/api/chat": "/v1/chat/completions",
    }
    for path, words in reasons.items():
        refused(server.post(path, {}), 404, words)
    for near in ("/completion", "/completions", "/v1/completion"):  # of llama-server, and mistakes
        refused(server.post(near, {}), 404, f"no route {near}: did you mean '/v1/completions'?")
    refused(server.post("/chat/completions", {}), 404, "did you mean '/v1/chat/completions'?")
    wrong = server.get(COMPLETIONS)
    refused(wrong, 405, "GET /v1/completions is not allowed, only POST")
    assert wrong.headers["allow"] == "POST"
    assert len(server.post(COMPLETIONS, {"prompt": "a", "model": "x" * 5000}).text) < 1000
    refused(server.post("/v1/load_lora_adapter", {"lora_name": "a", "lora_path": "/"}), 403, "allow-lora")


def test_errors_before_the_first_event_of_a_stream_have_a_status(server: Served) -> None:
    with pytest.raises(openai.BadRequestError, match="does not exist"):
        server.client().completions.create(model="builtin", prompt=[10**9], stream=True)
    with pytest.raises(openai.NotFoundError, match="no model"):
        server.client().chat.completions.create(model="no", messages=HELLO, stream=True)


def test_the_server_is_well_afterwards(server: Served) -> None:
    assert server.get("/health").json() == {"status": "ready"} and server.idle()
    assert "Traceback" not in server.log


def test_schemas_of_tools_may_be_nested_deeply(server: Served) -> None:
    """Reading, checking and compiling them recurse."""
    for depth in (100, 300, 900):
        parameters = '{"a":' * depth + "1" + "}" * depth
        body = (
            '{"messages": [{"role": "user", "content": "a"}], "max_tokens": 2, "tool_choice": "required", '
            '"tools": [{"type": "function", "function": {"name": "f", "parameters": ' + parameters + "}}]}"
        )
        answer = httpx.post(server.url + CHAT, content=body, headers=JSON, timeout=HANG)
        assert answer.status_code in (200, 400), answer.text
        if answer.status_code == 400:
            refused(answer, 400)
