"""Repeated streams: what follows what a client has already had, at every border between events."""

from __future__ import annotations

from typing import Any

import pytest
from served import Served

from outrider.serve.errors import ApiError
from outrider.serve.replicas.replay import Replay, parsed
from outrider.serve.wire import DONE, event

FUNCTION = {
    "name": "look_up",
    "parameters": {
        "type": "object",
        "properties": {"word": {"type": "string", "maxLength": 12}},
        "required": ["word"],
        "additionalProperties": False,
    },
}
TOOLS = [{"type": "function", "function": FUNCTION}]
MESSAGES = [{"role": "user", "content": "Tell me a story."}]
COMMON: dict[str, Any] = {"temperature": 0.8, "seed": 5, "stream": True, "request_id": "one"}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "completions": (
        "/v1/completions",
        {"prompt": ["The future of AI is", "Once"], "n": 2, "logprobs": 2, "echo": True, "max_tokens": 12,
         "stream_options": {"include_usage": True}, "return_origins": True, "return_token_ids": True},
    ),
    "chat": (
        "/v1/chat/completions",
        {"messages": MESSAGES, "n": 2, "logprobs": True, "top_logprobs": 1, "max_tokens": 12,
         "return_speculation": True, "return_token_ids": True},
    ),
    "calls": (
        "/v1/chat/completions",
        {"messages": MESSAGES, "max_tokens": 80, "tools": TOOLS, "tool_choice": "required"},
    ),
    "responses": ("/v1/responses", {"input": "Tell me a story.", "max_output_tokens": 12,
                   "include": ["message.output_text.logprobs"], "top_logprobs": 1}),
    "response_calls": (
        "/v1/responses",
        {"input": "Tell me a story.", "max_output_tokens": 80, "tool_choice": "required",
         "tools": [{"type": "function", **FUNCTION}]},
    ),
    "messages": ("/v1/messages", {"messages": MESSAGES, "max_tokens": 12}),
    "message_calls": (
        "/v1/messages",
        {"messages": MESSAGES, "max_tokens": 80, "tool_choice": {"type": "any"},
         "tools": [{"name": "look_up", "input_schema": FUNCTION["parameters"]}]},
    ),
}  # fmt: skip


def stream(server: Served, case: str, speculates: bool) -> list[str]:
    """The events of a case.  Where each ends depends on speculation."""
    path, body = CASES[case]
    answer = server.post(path, {**COMMON, **body, "speculation": {"enabled": speculates}})
    assert answer.status_code == 200, answer.text
    return [f"{text}\n\n" for text in answer.text.split("\n\n") if text]


def content(events: list[str]) -> dict[Any, Any]:
    """All that a client keeps of a stream, without statistics."""
    found: dict[Any, Any] = {}

    def add(key: tuple[Any, ...], value: Any) -> None:
        found[key] = found[key] + value if key in found else value

    for value in [parsed(text) for text in events if text != DONE]:
        if value.get("type") == "content_block_delta":
            kind, new = value["delta"].values()
            add((value["index"], kind), new)
            continue
        if "type" in value and "sequence_number" not in value:
            value.pop("usage", None)
            add(("kinds",), [value])
            continue
        if "type" in value:
            add(("numbers",), [value.pop("sequence_number")])
            kind = value["type"]
            if kind.endswith(".delta"):
                add((kind, value["output_index"]), value["delta"])
                add((kind, "logprobs"), value.get("logprobs", []))
            else:
                if (response := value.get("response")) is not None:
                    response.pop("usage")
                    found["created"] = {*found.get("created", ()), response.pop("created_at")}
                add(("kinds",), [value])
            continue
        found["created"] = {*found.get("created", ()), value["created"]}
        for choice in value["choices"]:
            delta = choice.get("delta", choice)
            at = choice["index"]
            for field in ("role", "finish_reason", "stop_reason"):
                if (one := {**choice, **delta}.get(field)) is not None:
                    add((at, field), [one])
            for field in ("text", "content"):
                add((at, field), delta.get(field) or "")
            for place, field in (
                (value, "prompt_token_ids"),
                (choice, "prompt_token_ids"),
                (choice, "token_ids"),
            ):
                add((at, field), place.get(field) or [])
            for call in delta.get("tool_calls", ()):
                add((at, "name", call["index"]), call["function"].get("name", ""))
                add((at, "ids", call["index"]), len(call.get("id", "")))
                add((at, "arguments", call["index"]), call["function"]["arguments"])
            for field, entries in (choice.get("logprobs") or {}).items():
                add((at, "logprobs", field), entries or [])
            add((at, "origins"), len(choice.get("outrider", {"tokens": []})["tokens"]))
        for field in ("usage", "speculation"):
            if value.get(field):
                add((field,), 1)
    assert len(found.pop("created", "1")) == 1
    return found


@pytest.mark.parametrize("case", CASES)
def test_a_repeated_stream_goes_on_where_the_first_one_ended(server: Served, case: str) -> None:
    first, again = stream(server, case, True), stream(server, case, False)
    whole, last = content(first), len(first) - (first[-1] == DONE)
    assert len(again) > 4
    for length in range(last + 1):
        replay = Replay(first[:length])
        joined = first[:length] + [text for event in again if (text := replay.rest(event)) is not None]
        found = content(joined)
        if ("numbers",) in whole:
            assert found[("numbers",)] == [*range(len(joined))]
            found[("numbers",)] = whole[("numbers",)]
        assert found == whole, length


def test_log_probabilities_of_a_response_are_left_out_with_their_text() -> None:
    def delta(text: str, number: int) -> str:
        kind = "response.output_text.delta"
        entries = [{"token": letter, "logprob": -1.0} for letter in text]
        place = {"output_index": 0, "sequence_number": number}
        return event({"type": kind, "delta": text, "logprobs": entries, **place}, kind)

    replay = Replay([delta("ab", 0)])
    rest = [replay.rest(text) for text in (delta("a", 0), delta("bc", 1), delta("d", 2))]
    assert rest == [None, delta("c", 1), delta("d", 2)]


def test_reasoning_is_left_out_as_far_as_it_was_sent() -> None:
    def part(**delta: str) -> str:
        return event({"choices": [{"index": 0, "delta": delta}], "created": 1})

    def thought(text: str) -> str:
        return part(reasoning=text, reasoning_content=text)

    replay = Replay([thought("Let"), thought(" me")])
    rest = [replay.rest(text) for text in (thought("Le"), thought("t me see"), part(content="Hi"))]
    assert rest == [None, thought(" see"), part(content="Hi")]


def test_a_message_that_fails_ends_with_an_error_of_its_api() -> None:
    began = event({"type": "message_start", "message": {}}, "message_start")
    refusal = ApiError(503, "it is gone.", code="replica_lost")
    (last,) = Replay([began]).failure(refusal)
    fault = {"type": "overloaded_error", "message": "it is gone.", "code": "replica_lost"}
    assert last == event({"type": "error", "error": fault}, "error")


def test_a_stream_that_had_not_begun_is_passed_on_as_it_is() -> None:
    text = 'data: {"choices": [],  "created": 1}\n\n'
    assert Replay([]).rest(text) is text
