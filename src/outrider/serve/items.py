"""Input items and tools of /v1/responses, in the shapes of chat completions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from outrider.serve.errors import ApiError

TEXTS = {"input_text": "text", "output_text": "text", "text": "text", "refusal": "refusal"}  # type -> key


def messages_of(given: str | Sequence[Mapping[str, Any]], instructions: str | None) -> list[dict[str, Any]]:
    """Chat messages of an input.  Raises ApiError naming the item."""
    messages: list[dict[str, Any]] = []
    thought = ""  # for the next message of the assistant
    if instructions:
        messages.append({"role": "system", "content": instructions})
    if isinstance(given, str):
        return [*messages, {"role": "user", "content": given}]
    for i, item in enumerate(given):
        kind = item.get("type", "message")
        if kind == "message":
            messages.append({"role": item.get("role"), "content": _content(item.get("content"), i)})
        elif kind == "function_call":
            _add_call(messages, item, i)
        elif kind == "function_call_output":
            output = _content(item.get("output"), i)
            messages.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": output})
        elif kind == "reasoning":
            thought = "\n".join(filter(None, [thought, _thought(item)]))
        else:
            raise ApiError(400, f"input items of type {kind!r} are not supported.", f"input.{i}.type")
        if kind != "reasoning":
            if thought and messages[-1]["role"] == "assistant":
                messages[-1]["reasoning_content"] = thought
            thought = ""
    return messages


def _thought(item: Mapping[str, Any]) -> str:
    """The text of a reasoning item; empty for one of a model that hides it."""
    parts = item.get("content")
    found = (
        [part.get("text") for part in parts if isinstance(part, Mapping)] if isinstance(parts, list) else []
    )
    return "\n".join(text for text in found if isinstance(text, str))


def _content(given: Any, i: int) -> str:
    parts = given if isinstance(given, list) else [given]
    texts: list[Any] = [
        part.get(TEXTS.get(str(part.get("type")))) if isinstance(part, Mapping) else part for part in parts
    ]
    if not all(isinstance(text, str) for text in texts):
        raise ApiError(
            400, f'input item {i} must have text: a string, or {{"type": "input_text", …}}.', f"input.{i}"
        )
    return "\n".join(texts)


def _add_call(messages: list[dict[str, Any]], item: Mapping[str, Any], i: int) -> None:
    """Add a call to the assistant's message, which is the last one or a new one."""
    if not isinstance(item.get("name"), str) or not isinstance(item.get("arguments"), str):
        raise ApiError(400, f"input item {i} needs a name and JSON arguments.", f"input.{i}")
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant", "content": None})
    function = {"name": item["name"], "arguments": item["arguments"]}
    call = {"id": item.get("call_id"), "type": "function", "function": function}
    messages[-1].setdefault("tool_calls", []).append(call)


def chat_tools(tools: Sequence[Mapping[str, Any]] | None) -> list[dict[str, Any]]:
    """Tools in the shape of chat completions.  Raises ApiError for those that are no functions."""
    made = []
    for i, tool in enumerate(tools or ()):
        if tool.get("type") != "function":
            raise ApiError(400, f"tools of type {tool.get('type')!r} are not supported.", f"tools.{i}")
        if not isinstance(tool.get("name"), str):
            raise ApiError(400, f'tool {i} must be {{"type": "function", "name": …}}.', f"tools.{i}")
        function = {key: value for key, value in tool.items() if key not in ("type", "strict")}
        made.append({"type": "function", "function": function})
    return made
