"""/v1/messages over a socket: bodies and events of Anthropic's API."""

from __future__ import annotations

import json
from typing import Any

import pytest
from content_blocks import joined_blocks, with_inputs_parsed
from served import Served

from outrider import LLM, SamplingParams
from outrider.outputs import CompletionOutput
from outrider.serve.errors import ApiError
from outrider.serve.messages.blocks import ContentBlocks, content_of, object_of
from outrider.serve.messages.job import end_of_turn
from outrider.serve.messages.protocol import MessagesBody
from outrider.serve.messages.translation import chat_body
from outrider.serve.responses import status_of
from outrider.serve.tool_calls import Parsed
from outrider.serve.tools import HERMES

PATH, COUNT, CHAT = "/v1/messages", "/v1/messages/count_tokens", "/v1/chat/completions"
HELLO = [{"role": "user", "content": "What is 3 + 4?"}]
SCHEMA = {
    "type": "object",
    "properties": {"a": {"enum": [3, 4]}},
    "required": ["a"],
    "additionalProperties": False,
}
TOOL = {"name": "add", "description": "Adds.", "input_schema": SCHEMA, "cache_control": {"type": "ephemeral"}}
COMMON: dict[str, Any] = {"model": "builtin", "messages": HELLO, "max_tokens": 40, "temperature": 0}


def events_of(server: Served, body: Any) -> list[dict[str, Any]]:
    """The events of a stream, each of which has its type as its name."""
    answer = server.post(PATH, {**body, "stream": True})
    assert answer.headers["content-type"].startswith("text/event-stream"), answer.text
    found = []
    for text in answer.text.strip().split("\n\n"):
        name, data = text.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    return found


def joined(events: list[dict[str, Any]]) -> dict[str, Any]:
    """The message that the events of a stream build."""
    message: dict[str, Any] = {}
    inputs: dict[int, str] = {}
    for event in events:
        if event["type"] == "message_start":
            message = event["message"]
        elif event["type"] == "content_block_start":
            assert event["index"] == len(message["content"])
            message["content"].append(event["content_block"])
        elif event["type"] == "content_block_delta":
            assert event["index"] == len(message["content"]) - 1
            block, place = message["content"][-1], event["index"]
            delta = {key: new for key, new in event["delta"].items() if key != "type"}
            if "partial_json" in delta:
                inputs[place] = inputs.get(place, "") + delta["partial_json"]
                block["input"] = object_of(inputs[place], False)
            else:
                ((key, new),) = delta.items()
                block[key] += new
        elif event["type"] == "message_delta":
            message |= {**event["delta"], "usage": event["usage"]}
    return message


def without_id(message: dict[str, Any]) -> dict[str, Any]:
    blocks = [{key: each[key] for key in each if key != "id"} for each in message["content"]]
    return {**message, "id": "", "content": blocks, "usage": message["usage"]["output_tokens"]}


def test_a_message_is_the_offline_reply(server: Served, llm: LLM) -> None:
    messages = [{"role": "system", "content": "Be short."}, *HELLO]
    (expected,) = llm.chat(messages, SamplingParams(temperature=0, max_tokens=40))
    text = expected.outputs[0].text
    for system in ("Be short.", [BILLED, {"type": "text", "text": "Be short.", "cache_control": {}}]):
        got = server.post(PATH, {**COMMON, "system": system}).json()
        assert got["content"] == [{"type": "text", "text": text}] and got["type"] == "message"
        assert got["role"] == "assistant" and got["model"] == "builtin" and got["id"].startswith("msg_")
    usage = got["usage"]
    assert usage["output_tokens"] == len(expected.outputs[0].token_ids)
    assert usage["cache_read_input_tokens"] > 0 == usage["cache_creation_input_tokens"]
    assert usage["input_tokens"] + usage["cache_read_input_tokens"] == len(expected.prompt_token_ids)
    counted = server.post(COUNT, {"model": "builtin", "system": "Be short.", "messages": HELLO}).json()
    assert counted == {"input_tokens": len(expected.prompt_token_ids)}


BILLED = {"type": "text", "text": "x-anthropic-billing-header: cch=1234;"}


def test_the_reason_of_the_end_is_named(server: Served) -> None:
    whole = server.post(PATH, {**COMMON, "max_tokens": 400}).json()
    cut = server.post(PATH, {**COMMON, "max_tokens": 3}).json()
    assert "content" in whole, whole
    (text,) = [block["text"] for block in whole["content"]]
    assert (whole["stop_reason"], whole["stop_sequence"]) == ("end_turn", None)
    assert (cut["stop_reason"], cut["usage"]["output_tokens"]) == ("max_tokens", 3)
    stop = text[4:7]
    stopped = server.post(PATH, {**COMMON, "stop_sequences": [stop]}).json()
    assert (stopped["stop_reason"], stopped["stop_sequence"]) == ("stop_sequence", stop)
    assert stopped["content"][0]["text"] == text[: text.index(stop)]


def test_a_text_that_was_aborted_is_no_end_of_a_turn() -> None:
    """It was "end_turn", of a response "completed", as if nothing were missing."""
    sample = CompletionOutput(0, "So", [1], "abort")
    for end in (lambda: end_of_turn(sample, Parsed("So", [])), lambda: status_of(sample)):
        with pytest.raises(ApiError, match="aborted") as caught:
            end()
        assert caught.value.status == 503


def test_events_build_the_same_message(server: Served) -> None:
    whole, events = server.post(PATH, COMMON).json(), events_of(server, COMMON)
    kinds = [event["type"] for event in events]
    assert kinds[:3] == ["message_start", "ping", "content_block_start"]
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert set(kinds[3:-3]) == {"content_block_delta"} and len(kinds) > 8
    first, last = events[0]["message"]["usage"], events[-2]["usage"]
    assert first["input_tokens"] == last["input_tokens"] and first["output_tokens"] == 0
    assert without_id(joined(events)) == without_id(whole)


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "add"}])
def test_tools_are_called(server: Served, choice: dict[str, str]) -> None:
    body = {**COMMON, "tools": [TOOL], "tool_choice": {**choice, "disable_parallel_tool_use": True}}
    whole = server.post(PATH, body).json()
    (call,) = whole["content"]
    assert (call["type"], call["name"], whole["stop_reason"]) == ("tool_use", "add", "tool_use")
    assert call["input"] in ({"a": 3}, {"a": 4}) and call["id"].startswith("toolu_")
    assert without_id(joined(events_of(server, body))) == without_id(whole)
    cut = server.post(PATH, {**body, "max_tokens": 1}).json()
    assert cut["stop_reason"] == "max_tokens" and all(each["input"] == {} for each in cut["content"])


def test_a_conversation_with_tools_is_that_of_chats(server: Served) -> None:
    """Counted with the template of the server, and token by token the same as the chat's."""
    call = {"type": "tool_use", "id": "toolu_1", "name": "add", "input": {"a": 3}}
    result = {"type": "tool_result", "tool_use_id": "toolu_1", "content": [{"type": "text", "text": "7"}]}
    thought = {"type": "thinking", "thinking": "Hm.", "signature": "x"}
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "Add"}, {"type": "text", "text": "3."}]},
        {"role": "assistant", "content": [thought, {"type": "text", "text": "Well."}, call]},
        {"role": "user", "content": [result, {"type": "text", "text": "So?"}]},
    ]
    body = MessagesBody(max_tokens=4, messages=messages, tools=[TOOL], system="Be short.")
    chat = chat_body(body)
    function = {"name": "add", "arguments": '{"a":3}'}
    assert chat.messages == [
        {"role": "system", "content": "Be short."},
        {"role": "user", "content": [{"type": "text", "text": "Add"}, {"type": "text", "text": "3."}]},
        {"role": "assistant", "content": "Well.", "reasoning_content": "Hm.",
         "tool_calls": [{"id": "toolu_1", "type": "function", "function": function}]},
        {"role": "tool", "tool_call_id": "toolu_1", "content": "7"},
        {"role": "user", "content": [{"type": "text", "text": "So?"}]},
    ]  # fmt: skip
    given = {"messages": messages, "tools": [TOOL], "system": "Be short."}
    same = {"messages": chat.messages, "tools": chat.tools, "max_tokens": 1}
    tokens = server.post(CHAT, same).json()["usage"]["prompt_tokens"]
    assert server.post(COUNT, given).json() == {"input_tokens": tokens}
    assert server.post(PATH, {**given, "max_tokens": 4}).status_code == 200


def test_consecutive_turns_of_one_role_are_one() -> None:
    call = {"type": "tool_use", "id": "t", "name": "add", "input": {}}
    thought = {"type": "thinking", "thinking": "Hm."}
    result = {"type": "tool_result", "tool_use_id": "t", "content": "7"}
    turns: list[tuple[str, Any]] = [
        ("user", "One."), ("user", [{"type": "text", "text": "Two."}]),
        ("assistant", [thought]), ("assistant", "So."), ("assistant", [call]),
        ("user", [result]), ("user", "Well?"), ("assistant", "It"), ("assistant", "is"),
    ]  # fmt: skip
    messages = [{"role": role, "content": content} for role, content in turns]
    chat = chat_body(MessagesBody(max_tokens=4, messages=messages))
    calls = [{"id": "t", "type": "function", "function": {"name": "add", "arguments": "{}"}}]
    assert chat.messages == [
        {"role": "user", "content": [{"type": "text", "text": "One."}, {"type": "text", "text": "Two."}]},
        {"role": "assistant", "content": "So.", "reasoning_content": "Hm.", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "t", "content": "7"},
        {"role": "user", "content": "Well?"},
        {"role": "assistant", "content": "It\nis"},
    ]
    assert chat.continue_final_message


def test_only_the_line_of_a_bill_is_left_out_of_a_system_prompt() -> None:
    line = BILLED["text"]
    cases = [("", []), (line, []), (f"{line}\nBe short.\nAnd kind.", ["Be short.\nAnd kind."])]
    for system, expected in cases:
        chat = chat_body(MessagesBody(max_tokens=4, messages=HELLO, system=system))
        assert [each["content"] for each in chat.messages[:-1]] == expected


def test_the_last_message_of_the_assistant_is_continued(server: Served) -> None:
    text = server.post(PATH, COMMON).json()["content"][0]["text"]
    prefill = [*HELLO, {"role": "assistant", "content": [{"type": "text", "text": text[:5]}]}]
    (block,) = server.post(PATH, {**COMMON, "messages": prefill}).json()["content"]
    assert text[:5] + block["text"] == text


def test_the_output_may_be_json_of_a_schema(server: Served) -> None:
    config = {"format": {"type": "json_schema", "schema": SCHEMA}, "effort": "low"}
    got = server.post(PATH, {**COMMON, "output_config": config, "temperature": None}).json()
    assert json.loads(got["content"][0]["text"]) in ({"a": 3}, {"a": 4})


def test_thinking_and_effort_are_variables_of_the_template() -> None:
    def of(**given: Any) -> dict[str, Any]:
        chat = chat_body(MessagesBody(max_tokens=4, messages=HELLO, **given))
        return {"effort": chat.reasoning_effort, **(chat.chat_template_kwargs or {})}

    assert of() == {"effort": None}
    assert of(thinking={"type": "enabled", "budget_tokens": 9}) == {"effort": None, "enable_thinking": True}
    given: Any = {"thinking": {"type": "disabled"}, "output_config": {"effort": "low"}}
    assert of(**given) == {"effort": "low", "enable_thinking": False}


def test_blocks_do_not_depend_on_when_the_parts_came() -> None:
    """Text behind a call is one block, at the end."""
    text = '<tool_call>{"name": "add", "arguments": {"a": 3}}</tool_call>'
    for before in ("", "First."):
        whole, slow = before + text + "Then." + text + "Last.", ContentBlocks("x")
        events = [
            event
            for end in range(len(whole) + 1)
            for event in slow.grow(HERMES.parse(whole[:end], end == len(whole)), end == len(whole))
        ]
        blocks = with_inputs_parsed(joined_blocks(events))
        assert blocks == content_of("x", HERMES.parse(whole, True))
        texts = [block["text"] for block in blocks if block["type"] == "text"]
        assert texts == [*filter(None, [before]), "Then.\nLast."]


def test_what_is_there_of_cut_arguments_is_kept() -> None:
    assert object_of('{"a": 3, "b": "tex', False) == {"a": 3, "b": "tex"}
    for complete in (False, True):
        for text in ("", "[1", '{"a": NaN}', '{"a": 1e999}', '{"a": -1e999}', f'{{"a": {"9" * 5000}}}'):
            assert object_of(text, complete) == {}, text[:20]


def test_complete_arguments_are_read_as_python_reads_them() -> None:
    """With half of a surrogate pair, which models write where a text is cut."""
    assert object_of('{"a": "\\ud83d", "b": 1}', True) == {"a": "\ud83d", "b": 1}


def test_a_number_that_is_not_finite_is_no_failure(server: Served) -> None:
    call = r'<tool_call>\{"name": "add", "arguments": \{"a": 1e999\}\}</tool_call>'
    body = {**COMMON, "tools": [TOOL], "structured_outputs": {"regex": call}, "max_tokens": 80}
    whole = server.post(PATH, body).json()
    assert [(block["name"], block["input"]) for block in whole["content"]] == [("add", {})], whole
    (block,) = joined_blocks(e for e in events_of(server, body) if e["type"].startswith("content_block"))
    assert block["input"] == '{"a": 1e999}', "a stream has the text of the model"


FORMAT = {"type": "json_schema", "schema": SCHEMA}
WRONG_FORMAT = {"format": {"type": "json_schema", "schema": {"type": "nonsense"}}}
IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "aGk="}}


@pytest.mark.parametrize(
    ("more", "text"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"messages": []}, "messages"),
        (
            {"messages": [{"role": "user", "content": [IMAGE]}]},
            "messages.0.content.0: blocks of type 'image'",
        ),
        ({"messages": [{"role": "user", "content": [{"type": "x"}]}]}, "'x'"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages.0.content"),
        ({"messages": [{"role": "user", "content": []}]}, "messages.0.content must not be empty"),
        ({"messages": [*HELLO, {"role": "user", "content": []}]}, "messages.1.content must not be empty"),
        ({"tools": [TOOL], "tool_choice": {"type": ["any"]}}, "tool_choice"),
        ({"thinking": {"type": []}}, "thinking.type"),
        ({"messages": [{"role": "tool", "content": "5"}]}, "messages.0.role"),
        ({"messages": [{"role": "assistant", "content": [{"type": "tool_use"}]}]}, "messages.0.content.0"),
        ({"system": [IMAGE]}, "system.0"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "web_search_20250305"),
        ({"tools": [{"name": "add"}]}, "input_schema"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "sub"}}, "sub"),
        ({"tools": [TOOL], "tool_choice": {"type": "all"}}, "tool_choice"),
        ({"tool_choice": {"type": "any"}}, "tool_choice needs tools"),
        ({"thinking": {"type": "maybe"}}, "thinking.type"),
        ({"output_config": WRONG_FORMAT}, "output_config.format: "),
        (
            {"output_config": {"format": FORMAT}, "structured_outputs": {"regex": "a"}},
            "structured_outputs and output_config.format.",
        ),
        (
            {"output_config": {"format": FORMAT}, "tools": [TOOL], "tool_choice": {"type": "any"}},
            "output_config.format and tool_choice.",
        ),
        ({"stop_sequences": [""]}, "stop_sequences"),
        ({"mcp_servers": [{"type": "url"}]}, "mcp_servers"),
        ({"temperature": -1}, "temperature"),
        ({"messages": [{"role": "user", "content": "x " * 600}]}, "prompt is too long: "),
    ],
)
def test_refusals_have_the_shape_of_anthropics_api(more: Any, text: str, server: Served) -> None:
    for stream in (False, True):
        answer = server.post(PATH, {**COMMON, **more, "stream": stream})
        assert answer.status_code == 400
        body = answer.json()
        assert body["type"] == "error" and body["error"]["type"] == "invalid_request_error"
        assert text in body["error"]["message"]


def test_malformed_conversations_are_not_counted(server: Served) -> None:
    more: Any
    for more in ({"thinking": {"type": {}}}, {"messages": [{"role": "user", "content": []}]}):
        assert server.post(COUNT, {"messages": HELLO, **more}).status_code == 400


def test_what_chats_refuse_is_refused() -> None:
    body = MessagesBody.model_construct(max_tokens=4, messages=HELLO, top_p="x")
    with pytest.raises(ApiError, match="top_p: ") as error:
        chat_body(body)
    assert (error.value.status, error.value.param) == (400, "top_p")


def test_other_errors_have_the_shape_of_anthropics_api(server: Served, adaptive: Served) -> None:
    cases = [
        (server.post(PATH, {**COMMON, "model": "x"}), 404, "not_found_error"),
        (server.post(f"{PATH}/batches", COMMON), 404, "not_found_error"),
        (server.get(PATH), 405, "invalid_request_error"),
        (server.post(PATH, content=b"{"), 400, "invalid_request_error"),
        (server.post(COUNT, {}), 400, "invalid_request_error"),
        (adaptive.post(PATH, COMMON), 401, "authentication_error"),
        (adaptive.post(PATH, COMMON, headers={"x-api-key": "wrong"}), 401, "authentication_error"),
        (adaptive.post(PATH, COMMON, headers={"x-api-key": "Bearer secret"}), 401, "authentication_error"),
    ]
    for answer, status, kind in cases:
        assert answer.status_code == status
        assert (answer.json()["type"], answer.json()["error"]["type"]) == ("error", kind)
    assert "type" not in server.post(CHAT, {**COMMON, "model": "x"}).json(), "other routes have OpenAI's"


def test_a_key_is_accepted_in_anthropics_header(adaptive: Served) -> None:
    for path in (PATH, CHAT, f"{PATH}?beta=true"):
        answer = adaptive.post(path, {**COMMON, "max_tokens": 2}, headers={"x-api-key": "secret"})
        assert answer.status_code == 200
    answer = adaptive.get("/v1/models", headers={"authorization": "Bearer secret"})
    assert answer.status_code == 200


def test_anthropics_client_reads_messages_and_errors(server: Served) -> None:
    anthropic = pytest.importorskip("anthropic")
    client = anthropic.Anthropic(base_url=server.url, api_key="EMPTY", max_retries=0)
    given = {key: value for key, value in COMMON.items() if key != "temperature"}  # newer clients have none
    given |= {"extra_body": {"temperature": 0}, "tools": [TOOL]}
    choice = {"type": "any", "disable_parallel_tool_use": True}
    with client.messages.stream(**given, tool_choice=choice) as stream:
        message = stream.get_final_message()
    assert message.stop_reason == "tool_use" and message.content[0].input in ({"a": 3}, {"a": 4})
    with pytest.raises(anthropic.BadRequestError, match="max_tokens"):
        client.messages.create(**{**given, "max_tokens": 0})
