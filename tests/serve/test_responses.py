"""/v1/responses over a socket, with OpenAI's client."""

from __future__ import annotations

import json
from typing import Any

import pytest
from openai import BadRequestError, OpenAI
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter
from served import Served

from outrider import LLM, SamplingParams
from outrider.serve.items import messages_of

SCHEMA = {
    "type": "object",
    "properties": {"a": {"enum": [3, 4]}},
    "required": ["a"],
    "additionalProperties": False,
}
ARGUMENTS = ({"a": 3}, {"a": 4})
INCLUDE = "message.output_text.logprobs"
EVENT = TypeAdapter[Any](ResponseStreamEvent)
TOOL: Any = {"type": "function", "name": "add", "parameters": SCHEMA, "strict": True}


@pytest.fixture(scope="module")
def client(server: Served) -> OpenAI:
    return server.client()


def test_a_response_is_the_offline_reply(client: OpenAI, llm: LLM) -> None:
    messages = [{"role": "system", "content": "Be short."}, {"role": "user", "content": "What is 3 + 4?"}]
    expected = llm.chat(messages, SamplingParams(temperature=0, max_tokens=None))[0]
    given: Any = {"model": "builtin", "instructions": "Be short.", "temperature": 0}
    inputs: Any = ["What is 3 + 4?", [{"role": "user", "content": [TEXT]}], messages[1:]]
    for question in inputs:
        got = client.responses.create(input=question, **given)
        assert got.output_text == expected.outputs[0].text and got.status == "completed"
        assert got.usage is not None and got.usage.input_tokens == len(expected.prompt_token_ids)
    cut = client.responses.create(input="What is 3 + 4?", max_output_tokens=2, **given)
    assert cut.status == "incomplete" and cut.incomplete_details is not None
    assert cut.incomplete_details.reason == "max_output_tokens"


TEXT = {"type": "input_text", "text": "What is 3 + 4?"}


def test_events_tell_the_same_response(client: OpenAI) -> None:
    given: Any = {"model": "builtin", "input": "What is 3 + 4?", "temperature": 0}
    whole = client.responses.create(**given)
    events = list(client.responses.create(**given, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type.removeprefix("response.") for event in events]
    assert kinds[:4] == ["created", "in_progress", "output_item.added", "content_part.added"]
    assert kinds[-4:] == ["output_text.done", "content_part.done", "output_item.done", "completed"]
    assert set(kinds[4:-4]) == {"output_text.delta"}
    deltas = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    last: Any = events[-1]
    assert deltas == whole.output_text == last.response.output_text


@pytest.mark.parametrize("more", [{}, {"tools": [TOOL], "tool_choice": "required"}])
def test_responses_and_events_have_every_field_of_openais_client(more: Any, server: Served) -> None:
    """Which does not check them itself, so that a missing one is found when it is read."""
    body = {"input": "Hello", "max_output_tokens": 30, "temperature": 0, **more}
    Response.model_validate(server.post("/v1/responses", body).json())
    lines = server.post("/v1/responses", {**body, "stream": True}).text.splitlines()
    events = [json.loads(line[6:]) for line in lines if line.startswith("data: ")]
    assert len(events) > 5
    for event in events:
        EVENT.validate_python(event)


def test_a_named_function_is_called(client: OpenAI) -> None:
    given: Any = {"model": "builtin", "input": "Add 3 and 4.", "temperature": 0, "tools": [TOOL],
                  "tool_choice": {"type": "function", "name": "add"}}  # fmt: skip
    (call,) = client.responses.create(**given).output
    assert call.type == "function_call" and (call.name, json.loads(call.arguments) in ARGUMENTS) == (
        "add",
        True,
    )
    events = list(client.responses.create(**given, stream=True))
    kinds = [event.type.removeprefix("response.") for event in events]
    deltas = [event.delta for event in events if event.type == "response.function_call_arguments.delta"]
    assert json.loads("".join(deltas)) in ARGUMENTS, "how many pieces there are depends on the steps' speed"
    assert list(dict.fromkeys(kinds[2:])) == [
        "output_item.added", "function_call_arguments.delta", "function_call_arguments.done",
        "output_item.done", "completed",
    ]  # fmt: skip


def test_calls_and_their_outputs_are_messages() -> None:
    call = {"type": "function_call", "call_id": "1", "name": "add", "arguments": '{"a": 1}'}
    items = [{"role": "user", "content": "Add."}, call, {**call, "call_id": "2"},
             {"type": "function_call_output", "call_id": "1", "output": "7"}]  # fmt: skip
    user, assistant, tool = messages_of(items, None)
    assert user == {"role": "user", "content": "Add."}
    assert [made["id"] for made in assistant["tool_calls"]] == ["1", "2"]
    assert tool == {"role": "tool", "tool_call_id": "1", "content": "7"}


def test_truncation_keeps_the_end_of_a_long_input(client: OpenAI) -> None:
    given: Any = {"model": "builtin", "input": "x " * 600, "max_output_tokens": 4}
    got = client.responses.create(**given, truncation="auto")
    assert got.usage is not None and (got.usage.input_tokens, got.truncation) == (512 - 4, "auto")
    with pytest.raises(BadRequestError, match="context"):
        client.responses.create(**given, truncation="disabled")


def test_items_of_other_servers_are_read() -> None:
    """Of a conversation that another model began: a refusal is its text, its reasoning is left out."""
    refusal = {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]}
    items = [{"role": "user", "content": "Add."}, {"type": "reasoning", "id": "r", "summary": []}, refusal]
    assert messages_of(items, None) == [
        {"role": "user", "content": "Add."}, {"role": "assistant", "content": "No."}
    ]  # fmt: skip


def test_the_reasoning_of_an_item_belongs_to_the_message_behind_it() -> None:
    thought = {"type": "reasoning", "id": "r", "content": [{"type": "reasoning_text", "text": "Hm."}]}
    call = {"type": "function_call", "call_id": "1", "name": "add", "arguments": "{}"}
    message = {"role": "assistant", "content": "Yes."}
    user = {"role": "user", "content": "Add."}
    assert messages_of([thought, message, thought, user, message], None) == [
        {**message, "reasoning_content": "Hm."}, user, message
    ]  # fmt: skip
    assert messages_of([thought, call], None)[0]["reasoning_content"] == "Hm."


@pytest.mark.parametrize(
    ("body", "text"),
    [
        ({"input": []}, "input"),
        ({"input": "a", "previous_response_id": "x"}, "not stored"),
        ({"input": "a", "background": True}, "background"),
        ({"input": "a", "top_logprobs": 2}, "top_logprobs needs include"),
        ({"input": "a", "include": [INCLUDE], "top_logprobs": 21}, "top_logprobs must be at most 20"),
        ({"input": "a", "include": [INCLUDE], "top_logprobs": "2"}, "top_logprobs"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "item_reference"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input item 0"),
        ({"input": [{"type": "function_call"}]}, "input item 0"),
        ({"input": "a", "tools": [{"type": "web_search"}]}, "web_search"),
        ({"input": "a", "text": {"format": {"type": "xml"}}}, "text.format"),
        ({"input": "a", "text": {"format": {"type": "json_schema"}}}, "text.format"),
        (
            {"input": "a", "text": {"format": {"type": "json_schema", "name": "a", "schema": 5}}},
            "text.format",
        ),
        ({"input": "a", "max_output_tokens": 0}, "max_output_tokens"),
    ],
)
def test_wrong_values_are_named(body: Any, text: str, server: Served) -> None:
    answer = server.post("/v1/responses", body)
    assert answer.status_code == 400 and text in answer.json()["error"]["message"]
