"""tool_choice of type allowed_tools, in the shapes of chat completions and of responses."""

from __future__ import annotations

import json
from typing import Any

import pytest
from openai import OpenAI
from served import Served

from outrider.serve.chat import Reply
from outrider.serve.errors import ApiError
from outrider.serve.tool_calls import ToolCall
from outrider.serve.tool_choice import ToolUse
from outrider.serve.tools import PARSERS

CHAT, RESPONSES = "/v1/chat/completions", "/v1/responses"
SCHEMA = {
    "type": "object",
    "properties": {"a": {"enum": [3, 4]}},
    "required": ["a"],
    "additionalProperties": False,
}
MESSAGES: Any = [{"role": "user", "content": "What is 3 + 4?"}]
NAMES = ("add", "now", "find")
TOOLS: Any = [{"type": "function", "function": {"name": n, "parameters": SCHEMA}} for n in NAMES]
FLAT: Any = [{"type": "function", "name": name, "parameters": SCHEMA} for name in NAMES]


def chosen(mode: Any, *names: str) -> Any:
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


def flat(mode: Any, *names: str) -> Any:
    tools = [{"type": "function", "name": name} for name in names]
    return {"type": "allowed_tools", "mode": mode, "tools": tools}


@pytest.fixture(scope="module")
def client(server: Served) -> OpenAI:
    return server.client()


def test_a_required_call_is_one_of_an_allowed_tool(client: OpenAI) -> None:
    for seed in range(4):
        got = client.chat.completions.create(
            model="builtin",
            messages=MESSAGES,
            seed=seed,
            tools=TOOLS,
            tool_choice=chosen("required", "find", "now"),
            parallel_tool_calls=False,
        ).choices[0]
        calls: Any = got.message.tool_calls
        assert len(calls) == 1 and calls[0].function.name in ("now", "find")
        assert json.loads(calls[0].function.arguments) in ({"a": 3}, {"a": 4})


def test_a_required_call_of_a_response_is_one_of_an_allowed_tool(client: OpenAI) -> None:
    choice = flat("required", "now")
    got = client.responses.create(
        model="builtin", input="What is 3 + 4?", tools=FLAT, tool_choice=choice, parallel_tool_calls=False
    )
    call: Any = got.output[0]
    assert (call.type, call.name, len(got.output)) == ("function_call", "now", 1)
    assert got.tool_choice.model_dump(exclude_none=True) == choice  # type: ignore[union-attr]


@pytest.mark.parametrize("path", [CHAT, RESPONSES])
def test_the_prompt_has_the_allowed_tools_alone(path: str, server: Served) -> None:
    if path == CHAT:
        body: Any = {"messages": MESSAGES, "max_tokens": 1}
        tools, choice = TOOLS, chosen("auto", "now")
    else:
        body = {"input": "What is 3 + 4?", "max_output_tokens": 1}
        tools, choice = FLAT, flat("auto", "now")

    def prompt(**more: Any) -> int:
        usage = server.post(path, {**body, **more}).json()["usage"]
        return int(usage.get("prompt_tokens") or usage["input_tokens"])

    assert prompt(tools=tools, tool_choice=choice) == prompt(tools=tools[1:2])


def test_calls_of_other_tools_are_left_out() -> None:
    text = "".join(
        f'<tool_call>{{"name": "{name}", "arguments": {{"a": 3}}}}</tool_call>' for name in ("add", "now")
    )
    limited = Reply(PARSERS["hermes"], ToolUse.of(TOOLS, chosen("auto", "now")))
    for end in range(len(text) + 1):
        parsed = limited.read(text[:end], "stop" if end == len(text) else None)
        assert {call.name for call in parsed.calls} <= {"now"} and not parsed.content
    assert parsed.calls == [ToolCall("now", '{"a": 3}')]
    assert len(Reply(PARSERS["hermes"], ToolUse.of(TOOLS, "auto")).read(text, "stop").calls) == 2


@pytest.mark.parametrize("shape", [chosen, flat])
def test_either_shape_is_read(shape: Any) -> None:
    use = ToolUse.of(TOOLS, shape("auto", "now", "add"))
    assert (use.names, use.required, use.form) == ({"add", "now"}, False, None)
    assert ToolUse.of(TOOLS, shape("required", "now")).required


@pytest.mark.parametrize(
    ("choice", "text"),
    [
        (chosen("auto"), "list of tools"),
        (chosen("none", "add"), "a mode"),
        (chosen([], "add"), "a mode"),
        (chosen("auto", "add", "other"), "'other', which is none of the tools"),
        ({"type": "allowed_tools"}, "a mode"),
        ({"type": "allowed_tools", "allowed_tools": 5}, "a mode"),
        ({"type": "allowed_tools", "mode": "auto", "tools": [{"type": "mcp"}]}, "list of tools"),
    ],
)
def test_a_wrong_value_is_refused(choice: Any, text: str) -> None:
    with pytest.raises(ApiError, match=text) as error:
        ToolUse.of(TOOLS, choice)
    assert error.value.param == "tool_choice"


@pytest.mark.parametrize("stray", [{"name": "add"}, {"function": {"name": "add"}}])
def test_a_name_beside_allowed_tools_forces_no_call(stray: dict[str, Any]) -> None:
    use = ToolUse.of(TOOLS, {**flat("auto", "now"), **stray})
    assert use.name is None and use.form is None and use.names == {"now"}
