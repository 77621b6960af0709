"""Tool calls in texts of the known formats, whole and as they grow."""

from __future__ import annotations

import json
from typing import Any

import pytest

from outrider.outputs import CompletionOutput
from outrider.serve.chat import Chat, Reply
from outrider.serve.protocol import ChatBody
from outrider.serve.tool_calls import Parsed, ToolCall, ToolParser
from outrider.serve.tool_choice import ToolUse
from outrider.serve.tools import HERMES, PARSERS, parser_for

CALLS = [("add", {"a": 1, "b": [2, "x"]}), ("now", {})]
TEXTS = {
    "hermes": '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": [2, "x"]}}\n</tool_call>\n'
    '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>',
    "llama3": '<|python_tag|>{"name": "add", "parameters": {"a": 1, "b": [2, "x"]}}; '
    '{"name": "now", "parameters": {}}',
    "mistral": '[TOOL_CALLS][{"name": "add", "arguments": {"a": 1, "b": [2, "x"]}}, {"name": "now"}]',
    "granite": '<|tool_call|>[{"name": "add", "arguments": {"a": 1, "b": [2, "x"]}}, {"name": "now"}]',
}
MORE = {
    "llama3": [TEXTS["llama3"].removeprefix("<|python_tag|>"), "\n" + TEXTS["llama3"]],
    "mistral": ['[TOOL_CALLS]add[ARGS]{"a": 1, "b": [2, "x"]}[TOOL_CALLS]now{}'],
}
WHOLE = [(name, text) for name in TEXTS for text in [TEXTS[name], *MORE.get(name, [])]]


@pytest.mark.parametrize(("name", "text"), WHOLE)
def test_calls_are_read(name: str, text: str) -> None:
    content, calls, *_ = PARSERS[name].parse(text, True)
    assert [(call.name, json.loads(call.arguments)) for call in calls] == CALLS and not content


@pytest.mark.parametrize(("name", "text"), [*WHOLE, *((n, f"Let me see. {t}") for n, t in TEXTS.items())])
def test_a_growing_text_gives_each_part_once(name: str, text: str) -> None:
    """Neither content nor calls that were given are taken back."""
    content, calls, grown = "", [], False
    for end in range(len(text) + 1):
        now = PARSERS[name].parse(text[:end], end == len(text))
        assert now.content.startswith(content) and len(now.calls) >= len(calls)
        for before, call in zip(calls, now.calls):
            assert call == before if before.complete else call.arguments.startswith(before.arguments)
        grown |= any(len(call.arguments) > 0 and not call.complete for call in now.calls)
        content, calls = now.content, now.calls
    assert grown, "arguments come in parts"
    assert (content, len(calls)) == ("Let me see." if text.startswith("Let") else "", 2)


@pytest.mark.parametrize("name", TEXTS)
@pytest.mark.parametrize("text", ["", "2 < 3", "<tool", "[TOOL", "<tool_call> oh", "{not json", '{"a": 1}'])
def test_other_texts_are_content(name: str, text: str) -> None:
    assert PARSERS[name].parse(text, True) == Parsed(text, [])


@pytest.mark.parametrize("name", TEXTS)
def test_text_behind_calls_is_content(name: str) -> None:
    text, content = f"First. {TEXTS[name]} Then this.", ""
    for end in range(len(text) + 1):
        now = PARSERS[name].parse(text[:end], end == len(text))
        assert now.content.startswith(content)
        content = now.content
    assert content == "First.\nThen this." and len(now.calls) == 2


@pytest.mark.parametrize("name", TEXTS)
@pytest.mark.parametrize("value", ["NaN", "-Infinity", "{oh"])
def test_a_call_whose_arguments_are_no_json_is_not_complete(name: str, value: str) -> None:
    text = TEXTS[name].replace("[2,", f"[{value},")
    add, *others = PARSERS[name].parse(text, True).calls
    assert add.name == "add" and not add.complete and all(call.complete for call in others)


def test_what_follows_complete_arguments_is_no_part_of_them() -> None:
    text = '<tool_call>{"name": "add", "arguments": {"a": 1} \n'
    assert HERMES.parse(text, False).calls == [ToolCall("add", '{"a": 1}', False)]


def test_bare_json_that_calls_no_tool_is_content() -> None:
    for text in ('{"name": "Ada", "age": 36}', '{"name": "Ada", "parameters": {}}'):
        assert PARSERS["llama3"].parse(text, True, {"add": {}}) == Parsed(text, [])
    assert PARSERS["llama3"].parse('{"name": "add", "parameters": {}}', True, {"add": {}}).calls


def test_the_template_names_the_format() -> None:
    assert parser_for("auto", "… [TOOL_CALLS] …") is PARSERS["mistral"]
    assert parser_for("auto", "<|python_tag|>") is PARSERS["llama3"]
    assert parser_for("llama3_json", "") is PARSERS["llama3"]
    assert parser_for("auto", "<tool_call>") is parser_for("auto", "") is PARSERS["hermes"]
    assert parser_for("mistral", "<tool_call>") is PARSERS["mistral"]
    assert parser_for("auto", "<tool_call>\n<function=f>\n<parameter=a>") is PARSERS["qwen3_coder"]
    assert parser_for("auto", "'<|tool_call|>'") is PARSERS["granite"]


XML = """<tool_call>
<function=add>
<parameter=a>
1
</parameter>
<parameter=code>
print("</function>")

<tool_call>
</parameter>
<parameter=flag>
True
</parameter>
</function>
</tool_call>"""
SCHEMAS = {
    "add": {
        "properties": {"a": {"type": "integer"}, "code": {"type": "string"}, "flag": {"type": "boolean"}},
    },
    "now": {},
}
EXPECTED = {"a": 1, "code": 'print("</function>")\n\n<tool_call>', "flag": True}
NOW = "<tool_call>\n<function=now>\n</function>\n</tool_call>"


def grown(parser: ToolParser, text: str) -> Parsed:
    """The last parse of a text that grows by a character, which keeps what it had."""
    content, arguments = "", ["", ""]
    for end in range(len(text) + 1):
        now = parser.parse(text[:end], end == len(text), SCHEMAS)
        assert now.content.startswith(content)
        for i, call in enumerate(now.calls):
            assert call.arguments.startswith(arguments[i])
            arguments[i] = call.arguments
        content = now.content
    assert content == "Let me see.\nDone." and [call.name for call in now.calls] == ["add", "now"]
    assert [json.loads(each) for each in arguments] == [EXPECTED, {}]
    return now


def test_calls_in_tags_come_in_parts_with_the_types_of_their_schemas() -> None:
    parser, text = PARSERS["qwen3_coder"], f"Let me see.\n{XML}\n{NOW}\nDone."
    now = grown(parser, text)
    assert all(call.complete for call in now.calls)


def test_calls_in_tags_may_lack_the_outer_ones() -> None:
    """Models of 4-bit weights leave them out: the calls stayed text."""
    inner = [text.removeprefix("<tool_call>\n").removesuffix("\n</tool_call>") for text in (XML, NOW)]
    parser, text = PARSERS["qwen3_coder"], "Let me see.\n{}\n{}\nDone.".format(*inner)
    grown(parser, text)
    opened = parser.parse(f"{inner[0]}\n</tool_call>\n{NOW}", True, SCHEMAS)
    assert not opened.content and [call.name for call in opened.calls] == ["add", "now"]


def test_a_tag_without_the_outer_one_is_text_if_it_names_no_tool() -> None:
    parser = PARSERS["qwen3_coder"]
    for text in ("Write <function=f> in front.", "<function=", f"A <function=f> {NOW[12:-13]}"):
        assert parser.parse(text, True, {"add": {}}) == Parsed(text, [])
    (call,) = parser.parse(f"Not <function=f>.\n{NOW}", True, SCHEMAS).calls
    assert call.name == "now"


def test_text_between_a_tag_of_no_tool_and_the_first_call_is_content() -> None:
    text, content = f"Not <function=f>\n<parameter=a>\n1\nBut this:\n{NOW}\nDone.", ""
    for end in range(len(text) + 1):
        now = PARSERS["qwen3_coder"].parse(text[:end], end == len(text), SCHEMAS)
        assert now.content.startswith(content)
        content = now.content
    lead = "Not\n<function=f>\n<parameter=a>\n1\nBut this:"
    assert content == f"{lead}\nDone." and now.lead == len(lead) and [*now.calls] == [ToolCall("now", "{}")]


def test_a_call_in_tags_that_is_cut_off_is_not_complete() -> None:
    (call,) = PARSERS["qwen3_coder"].parse(XML[: XML.index("True")], True, SCHEMAS).calls
    assert not call.complete and json.loads(call.arguments + "}") == {"a": 1, "code": EXPECTED["code"]}


@pytest.mark.parametrize(
    ("schema", "value", "expected"),
    [
        ({"anyOf": [{"type": "integer"}, {"type": "null"}]}, "5", 5),
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, "null", None),
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, "5", "5"),
        ({"type": ["string", "null"]}, "12345", "12345"),
        ({"$ref": "#/$defs/point"}, '{"x": 1}', {"x": 1}),
        ({"$ref": "#/$defs/self"}, "1", "1"),
        ({"enum": [1, 2]}, "1", 1),
        ({"enum": ["1", "2"]}, "1", "1"),
        ({"const": True}, "True", True),
        ({"type": "number"}, "3", 3),
        ({}, "3", "3"),
        ({"type": "object"}, "[1]", [1]),
        ({"type": "string"}, '"quoted"', '"quoted"'),
    ],
)
def test_values_in_tags_have_the_types_that_their_schemas_allow(
    schema: object, value: str, expected: object
) -> None:
    root = {
        "properties": {"a": schema},
        "$defs": {"point": {"type": "object"}, "self": {"$ref": "#/$defs/self"}},
    }
    text = f"<tool_call>\n<function=add>\n<parameter=a>\n{value}\n</parameter>\n</function>\n</tool_call>"
    (call,) = PARSERS["qwen3_coder"].parse(text, True, {"add": root}).calls
    assert json.loads(call.arguments) == {"a": expected}


def test_a_parameter_without_an_end_or_that_comes_twice_spoils_no_other() -> None:
    text = "<tool_call>\n<function=add>\n<parameter=a>\n1\n<parameter=b>\n2\n</parameter>\n"
    text += "<parameter=a>\n3\n</parameter>\n</function>\n</tool_call>"
    arguments = ""
    for end in range(len(text) + 1):
        for call in PARSERS["qwen3_coder"].parse(text[:end], end == len(text), {}).calls:
            assert call.arguments.startswith(arguments)
            arguments = call.arguments
    assert json.loads(arguments) == {"a": "1", "b": "2"}


def test_a_value_of_another_type_than_its_schema_is_text() -> None:
    (call,) = PARSERS["qwen3_coder"].parse(XML.replace("\n1\n", "\none\n"), True, SCHEMAS).calls
    assert json.loads(call.arguments)["a"] == "one"  # what is no JSON can only be text


@pytest.mark.parametrize("name", ["hermes", "pythonic"])
def test_a_long_call_is_not_parsed_at_each_token(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    value = "if x:\n    print('x')\n" * 1000
    text = f"[f(a={value!r})]"
    if name == "hermes":
        text = f"<tool_call>{json.dumps({'name': 'f', 'arguments': {'a': value}})}</tool_call>"
    reads = list[int]()
    reply = Reply(PARSERS[name], ToolUse.of([{"type": "function", "function": {"name": "f"}}], "auto", None))
    read = reply.read
    monkeypatch.setattr(reply, "read", lambda text, reason: reads.append(len(text)) or read(text, reason))
    body = ChatBody(messages=[{"role": "user", "content": "Hello"}])
    chat: Any = Chat(None, body, None, reply)  # type: ignore[arg-type]
    arguments, sizes = "", list[int]()
    for end in range(4, len(text) + 4, 4):
        sample = CompletionOutput(0, text[:end], [], "stop" if end >= len(text) else None)
        for part in chat.delta(0, sample):
            for call in part["delta"].get("tool_calls", ()):
                arguments += call["function"]["arguments"]
                sizes.append(end)
    assert json.loads(arguments) == {"a": value} and part["finish_reason"] == "tool_calls"
    assert len(sizes) > 200 and sizes[1] - sizes[0] <= 8, "a short call comes token by token"
    assert len(reads) < len(text) / 4 / 4
