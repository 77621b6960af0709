"""/v1/chat/completions over a socket, with OpenAI's client."""

from __future__ import annotations

import json
from typing import Any

import pytest
from openai import OpenAI
from served import Served

from outrider import LLM, SamplingParams

MESSAGES: Any = [{"role": "system", "content": "Be short."}, {"role": "user", "content": "What is 3 + 4?"}]
TOOL: Any = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}


@pytest.fixture(scope="module")
def client(server: Served) -> OpenAI:
    return server.client()


def test_a_reply_is_that_of_the_offline_api(client: OpenAI, llm: LLM) -> None:
    expected = llm.chat(MESSAGES, SamplingParams(temperature=0, max_tokens=30))[0].outputs[0]
    given: Any = {"model": "builtin", "messages": MESSAGES, "temperature": 0, "max_completion_tokens": 30}
    got = client.chat.completions.create(**given).choices[0]
    assert (got.message.role, got.message.content) == ("assistant", expected.text)
    assert got.finish_reason == expected.finish_reason and not got.message.tool_calls
    chunks = list(client.chat.completions.create(stream=True, **given))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == expected.text
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices[0].finish_reason] == [
        expected.finish_reason
    ]


def test_without_a_limit_a_reply_goes_on_to_its_end(client: OpenAI, llm: LLM) -> None:
    expected = llm.chat(MESSAGES, SamplingParams(seed=1, max_tokens=None))[0].outputs[0]
    got = client.chat.completions.create(model="builtin", messages=MESSAGES, seed=1)
    assert got.choices[0].message.content == expected.text
    assert got.usage is not None and got.usage.completion_tokens == len(expected.token_ids)


def test_developer_messages_and_text_parts_are_read(client: OpenAI) -> None:
    parts: Any = [
        {"role": "developer", "content": "Be short."},
        {"role": "user", "content": [{"type": "text", "text": "What is 3 + 4?"}]},
    ]
    answers = [
        client.chat.completions.create(model="builtin", messages=messages, temperature=0, max_tokens=20)
        for messages in (MESSAGES, parts)
    ]
    assert len({answer.choices[0].message.content for answer in answers}) == 1


def test_logprobs_name_each_token_and_its_alternatives(client: OpenAI) -> None:
    given: Any = {"model": "builtin", "messages": MESSAGES, "max_tokens": 6, "temperature": 0}
    choice = client.chat.completions.create(**given, logprobs=True, top_logprobs=3).choices[0]
    assert choice.logprobs is not None and choice.logprobs.content is not None
    assert "".join(entry.token for entry in choice.logprobs.content).startswith(choice.message.content or "")
    for entry in choice.logprobs.content:
        assert len(entry.top_logprobs) == 3 and bytes(entry.bytes or []).decode() == entry.token
        assert entry.top_logprobs[0].logprob >= entry.logprob
    streamed = client.chat.completions.create(**given, logprobs=True, top_logprobs=3, stream=True)
    parts = [chunk.choices[0].logprobs for chunk in streamed]
    found = [entry for part in parts if part and part.content for entry in part.content]
    assert [entry.token for entry in found] == [entry.token for entry in choice.logprobs.content]


def test_the_bytes_of_tokens_make_up_a_character(client: OpenAI) -> None:
    """Also where no token is one of its own, as OpenAI promises."""
    given: Any = {"model": "builtin", "messages": MESSAGES, "extra_body": {"guided_choice": ["😀"]}}
    choice = client.chat.completions.create(**given, logprobs=True, top_logprobs=1).choices[0]
    assert choice.logprobs is not None and choice.logprobs.content is not None
    emitted = choice.logprobs.content[:-1]  # without the end
    assert len(emitted) > 1 and b"".join(bytes(one.bytes or []) for one in emitted).decode() == "😀"
    for one in emitted:
        assert one.top_logprobs[0].token != one.token or one.top_logprobs[0].bytes == one.bytes


def test_the_last_message_can_be_continued(client: OpenAI, llm: LLM) -> None:
    messages: Any = [*MESSAGES, {"role": "assistant", "content": "The answer"}]
    flags = {"add_generation_prompt": False, "continue_final_message": True}
    expected = llm.chat(messages, SamplingParams(temperature=0, max_tokens=9), **flags)[0].outputs[0].text
    got = client.chat.completions.create(
        model="builtin", messages=messages, temperature=0, max_tokens=9, extra_body=flags
    )
    assert got.choices[0].message.content == expected


def test_tools_are_accepted_and_a_text_without_calls_is_content(client: OpenAI) -> None:
    given: Any = {"model": "builtin", "messages": MESSAGES, "temperature": 0, "max_tokens": 20}
    plain = client.chat.completions.create(**given).choices[0]
    for choice in ("auto", "none"):
        got = client.chat.completions.create(**given, tools=[TOOL], tool_choice=choice).choices[0]
        assert got.message.content == plain.message.content and not got.message.tool_calls


def test_tokens_of_a_conversation_are_those_of_its_prompt(server: Served, llm: LLM) -> None:
    got = server.post("/tokenize", {"messages": MESSAGES, "return_token_strs": True}).json()
    expected = llm.chat(MESSAGES, SamplingParams(max_tokens=1))[0].prompt_token_ids
    assert got["tokens"] == expected and got["count"] == len(expected) == len(got["token_strs"])
    text = server.post("/detokenize", {"tokens": expected}).json()["prompt"]
    assert "What is 3 + 4?" in text and server.post("/tokenize", {"prompt": "Hi"}).json()["count"] >= 1


def test_an_assistant_message_of_null_is_an_empty_one(client: OpenAI) -> None:
    def prompt(content: str | None) -> Any:
        messages: Any = [*MESSAGES, {"role": "assistant", "content": content}, MESSAGES[1]]
        given: Any = {"model": "builtin", "messages": messages, "max_tokens": 1}
        got: Any = client.chat.completions.create(**given, extra_body={"return_token_ids": True})
        return got.prompt_token_ids

    assert prompt(None) == prompt("")


SCHEMA = {
    "type": "object",
    "properties": {"a": {"enum": [3, 4]}},
    "required": ["a"],
    "additionalProperties": False,
}


def test_a_response_format_constrains_the_reply(client: OpenAI) -> None:
    given: Any = {"model": "builtin", "messages": MESSAGES, "seed": 1}
    schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": True}}
    got = client.chat.completions.create(**given, response_format=schema).choices[0].message.content
    assert json.loads(got or "") in ({"a": 3}, {"a": 4})
    extra: list[Any] = [{"guided_choice": ["yes", "no"]}, {"structured_outputs": {"regex": "yes|no"}}]
    for body in extra:
        got = client.chat.completions.create(**given, extra_body=body).choices[0].message.content
        assert got in ("yes", "no")


def test_required_calls_keep_the_references_of_their_schemas(client: OpenAI) -> None:
    schema = {
        "$defs": {"x": {"enum": [3, 4]}},
        **SCHEMA,
        "properties": {"a": {"$ref": "#/$defs/x"}},
    }
    tools: Any = [{"type": "function", "function": {"name": n, "parameters": schema}} for n in ("f", "g")]
    got = client.chat.completions.create(
        model="builtin",
        messages=MESSAGES,
        seed=1,
        tools=tools,
        tool_choice="required",
        parallel_tool_calls=False,
        reasoning_effort="low",
    ).choices[0]
    calls: Any = got.message.tool_calls
    assert len(calls) == 1 and json.loads(calls[0].function.arguments) in ({"a": 3}, {"a": 4})


def test_tools_of_one_name_allow_the_arguments_of_each(client: OpenAI) -> None:
    """Those of the last one alone were allowed."""
    schemas = [{**SCHEMA, "properties": {"a": {"const": value}}} for value in (5, 6)]
    tools: Any = [{"type": "function", "function": {"name": "f", "parameters": each}} for each in schemas]
    for choice in ("required", {"type": "function", "function": {"name": "f"}}):
        given: Any = {
            "model": "builtin",
            "messages": MESSAGES,
            "tools": tools,
            "tool_choice": choice,
            "n": 32,
        }
        got = client.chat.completions.create(**given, seed=1, temperature=2.0, parallel_tool_calls=False)
        calls: Any = [each.message.tool_calls for each in got.choices]
        assert {call[0].function.arguments for call in calls} == {'{"a": 5}', '{"a": 6}'}


def test_forced_tool_calls_are_constrained_to_their_schemas(client: OpenAI) -> None:
    note = {"type": "string", "minLength": 100, "maxLength": 200}
    schema = {**SCHEMA, "properties": {**SCHEMA["properties"], "note": note}, "required": ["a", "note"]}
    tool = {"type": "function", "function": {"name": "add", "parameters": schema}}
    given: Any = {"model": "builtin", "messages": MESSAGES, "seed": 1, "tools": [tool],
                  "parallel_tool_calls": False}  # fmt: skip
    for choice in ("required", {"type": "function", "function": {"name": "add"}}):
        got = client.chat.completions.create(**given, tool_choice=choice).choices[0]
        calls: Any = got.message.tool_calls
        assert calls and all(call.function.name == "add" for call in calls)
        assert not any("\n" in call.function.arguments for call in calls)
        assert all(json.loads(call.function.arguments)["a"] in (3, 4) for call in calls)
        streamed = list(client.chat.completions.create(**given, tool_choice=choice, stream=True))
        parts: Any = [call for c in streamed for call in c.choices[0].delta.tool_calls or ()]
        assert len({part.index for part in parts}) == len(calls) < len(parts), "arguments come in parts"
        for i, call in enumerate(calls):
            own = [part for part in parts if part.index == i]
            assert own[0].id and own[0].function.name == "add" and not any(part.id for part in own[1:])
            assert "".join(part.function.arguments for part in own) == call.function.arguments
        assert not any(chunk.choices[0].delta.content for chunk in streamed)
