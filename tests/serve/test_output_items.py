"""The items of /v1/responses, from texts that grow character by character."""

from __future__ import annotations

from typing import Any

import pytest

from outrider.serve.chat import Reply
from outrider.serve.output_items import OutputItems
from outrider.serve.tool_choice import ToolUse
from outrider.serve.tools import HERMES, PARSERS

CALLS = ['{"a": 3}', '{"b": {"c": [1, "}"]}}']
TEXT = "Let me see." + "".join(
    f'<tool_call>{{"name": "f{i}", "arguments": {call}}}</tool_call>' for i, call in enumerate(CALLS)
)


def grown(text: str, status: str, step: int, reply: Reply | None = None) -> tuple[list[Any], list[Any]]:
    """Items and events of a text that comes in parts of so many characters."""
    reply, made, events = reply or Reply(HERMES), OutputItems("resp_1"), list[Any]()
    for end in range(step, len(text), step):
        events += made.grow(reply.read(text[:end], None), None)
    reason = "length" if status == "incomplete" else "stop"
    events += made.grow(reply.read(text, reason), status)
    return made.items, events


def named(items: list[Any]) -> list[Any]:
    """Items without their random ids."""
    return [{key: value for key, value in item.items() if "id" not in key} for item in items]


def test_calls_come_in_parts_and_make_the_items_of_the_whole_text() -> None:
    whole, _ = grown(TEXT, "completed", len(TEXT))
    items, events = grown(TEXT, "completed", 1)
    assert named(items) == named(whole)
    assert [item["type"] for item in items] == ["message", "function_call", "function_call"]
    assert all(item["status"] == "completed" for item in items)
    for place, call in enumerate(CALLS, start=1):
        mine = [event for event in events if event.get("output_index") == place]
        deltas = [event["delta"] for event in mine if event["type"].endswith("arguments.delta")]
        assert "".join(deltas) == call and len(deltas) > 3
        kinds = [event["type"].removeprefix("response.") for event in mine]
        assert kinds[0] == "output_item.added" and mine[0]["item"]["arguments"] == ""
        assert kinds[-2:] == ["function_call_arguments.done", "output_item.done"]
        assert mine[-2]["arguments"] == mine[-1]["item"]["arguments"] == call
    added = [event["output_index"] for event in events if event["type"].endswith("item.added")]
    assert added == [0, 1, 2]


def test_a_call_that_was_begun_is_incomplete_and_no_content() -> None:
    cut = TEXT[: TEXT.index('"}"]')]
    items, _ = grown(cut, "incomplete", 1)
    assert [item["status"] for item in items] == ["incomplete", "completed", "incomplete"]
    assert items[0]["content"][0]["text"] == "Let me see." and CALLS[1].startswith(items[2]["arguments"])
    assert items[2]["arguments"]


def test_a_forced_call_comes_in_parts() -> None:
    items, events = grown(CALLS[1], "completed", 4, FORCED)
    assert [(item["name"], item["arguments"], item["status"]) for item in items] == [
        ("f", CALLS[1], "completed")
    ]
    assert sum(event["type"].endswith("arguments.delta") for event in events) == -(-len(CALLS[1]) // 4)


def test_an_empty_text_is_an_empty_message() -> None:
    items, events = grown("", "completed", 1)
    assert [item["content"][0]["text"] for item in items] == [""]
    assert not any(event["type"].endswith("delta") for event in events)


F = '{"name": "f", "arguments": {"a": 1}}'
LLAMA = Reply(PARSERS["llama3"], ToolUse.of([{"type": "function", "function": {"name": "f"}}], "auto"))
MISTRAL = Reply(PARSERS["mistral"])
FORCED = Reply(HERMES, ToolUse(name="f"))
CUT = [  # reply, text, its end, types and statuses of its items
    (None, 'Hi <tool_call>{"name": "f", "arguments": {"a": "xy', "incomplete", "m- f-"),
    (None, 'Hi <tool_call>{"name": "f", "arguments": {"a": x}}</tool_call> bye', "completed", "m f-"),
    (None, '<tool_call>{"name": "f", "arguments": {"a": x}}<tool_call>' + F, "completed", "f- f"),
    (None, f'<tool_call>{F}</tool_call><tool_call>{{"name": "g", "arguments": {{bad', "completed", "f f-"),
    (None, f"<tool_call>{F}</tool_call> mid <tool_call>{F}</tool_call> end", "completed", "f m f"),
    (None, f"A <tool_call>{F}</tool_call> mid <tool_call>{F}</tool_call>", "completed", "m f f"),
    (None, '<tool_call>{"name": "a\nb", "arguments": {"a": 1}}', "completed", "m"),
    (None, "a <tool b", "completed", "m"),
    (FORCED, '{"a": "x', "incomplete", "f-"),
    (FORCED, '{"a": "x"}', "completed", "f"),
    (Reply(HERMES, ToolUse(required=True)), f'[{F}, {{"name": "f", "arguments": {{"a', "incomplete", "f f-"),
    (Reply(HERMES, ToolUse(single=True)), f"<tool_call>{F}</tool_call>\n<tool_call>{F}", "completed", "f"),
    (LLAMA, f"{F} and more", "completed", "f m"),
    (LLAMA, F.replace('"f"', '"z"') + " and more", "completed", "m"),
    (LLAMA, f"{F} <|python_tag|>{F}", "completed", "f m"),
    (LLAMA, F[:-4], "incomplete", "f-"),
    (MISTRAL, 'Hey [TOOL_CALLS]f[ARGS]{"a": 1, "b": ', "incomplete", "m- f-"),
    (MISTRAL, f"[TOOL_CALLS][{F}, {F}] bye", "completed", "f f m"),
]


@pytest.mark.parametrize(("reply", "text", "status", "expected"), CUT)
def test_a_text_has_the_same_items_in_parts_and_whole(
    reply: Reply | None, text: str, status: str, expected: str
) -> None:
    whole, _ = grown(text, status, len(text), reply)
    short = [item["type"][0] + "-" * (item["status"] == "incomplete") for item in whole]
    assert short == expected.split()
    for step in (1, 3, 7):
        assert grown(text, status, step, reply)[0] == whole
