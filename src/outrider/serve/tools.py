"""Tool calls in the text of a model: the formats of Hermes and Qwen, Llama 3 and Mistral."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

_DECODER = json.JSONDecoder()


class ToolCall(NamedTuple):
    """name: of the function.  arguments: JSON text."""

    name: str
    arguments: str


class Parsed(NamedTuple):
    """content: text that is no call.  calls: those that are complete."""

    content: str
    calls: list[ToolCall]


@dataclass(frozen=True)
class ToolParser:
    """One format.

    marker: where calls begin.  bare: a text that begins with `{` is a call, too.
    read: text from the first marker on -> complete calls.
    """

    marker: str
    read: Callable[[str], list[ToolCall]]
    bare: bool = False

    def parse(self, text: str, finished: bool, names: Container[str] | None = None) -> Parsed:
        """Content and calls.  Of a text that is not finished, content that may become a marker is withheld.

        A finished text without a complete call is content.
        names: functions; a bare object that calls none of them is content.
        """
        bare = False
        start = text.find(self.marker)
        if self.bare and start < 0 and text.lstrip().startswith("{"):
            start, bare = len(text) - len(text.lstrip()), True
        if start >= 0:
            calls = self.read(text[start:])
            if bare and names is not None:
                calls = [call for call in calls if call.name in names]
            if finished and not calls:
                return Parsed(text, [])
            return Parsed(text[:start].rstrip(), calls)
        if finished:
            return Parsed(text, [])
        most = min(len(text), len(self.marker) - 1)
        held = next((n for n in range(most, 0, -1) if self.marker.startswith(text[-n:])), 0)
        return Parsed(text[: len(text) - held].rstrip(), [])  # space before a marker is no content


def _call(value: Any, strict: bool) -> ToolCall | None:
    """The call of a JSON object with a name and arguments (Llama 3: parameters).

    strict: an object without arguments is no call.
    """
    if not isinstance(value, Mapping) or not isinstance(value.get("name"), str):
        return None
    if strict and not ("arguments" in value or "parameters" in value):
        return None
    arguments = value.get("arguments", value.get("parameters", {}))
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return ToolCall(value["name"], text)


def _values(text: str, at: int, strict: bool = False) -> tuple[list[ToolCall], int]:
    """The calls in one JSON value at an index of the text, and where it ends; (-1) if it is not complete."""
    try:
        value, end = _DECODER.raw_decode(text, at)
    except (ValueError, RecursionError):
        return [], -1
    items = value if isinstance(value, list) else [value]
    return [call for item in items if (call := _call(item, strict)) is not None], end


def _hermes(text: str) -> list[ToolCall]:
    """<tool_call>{"name": …, "arguments": {…}}</tool_call>, several times."""
    calls: list[ToolCall] = []
    for found in re.finditer(r"<tool_call>\s*", text):
        calls += _values(text, found.end())[0]
    return calls


def _llama3(text: str) -> list[ToolCall]:
    """<|python_tag|>{"name": …, "parameters": {…}}; several are separated by semicolons."""
    calls: list[ToolCall] = []
    at = len(found[0]) if (found := re.match(r"(<\|python_tag\|>)?\s*", text)) else 0
    while at >= 0:
        more, at = _values(text, at, strict=True)
        calls += more
        separator = re.compile(r"\s*;\s*").match(text, at) if at >= 0 else None
        at = separator.end() if separator else -1
    return calls


def _mistral(text: str) -> list[ToolCall]:
    """[TOOL_CALLS][{"name": …, "arguments": {…}}], or [TOOL_CALLS]name[ARGS]{…}, several times."""
    calls: list[ToolCall] = []
    for part in text.split("[TOOL_CALLS]")[1:]:
        named = re.match(r"\s*([\w.-]+)\s*(?:\[CALL_ID\]\s*\w+\s*)?(?:\[ARGS\])?\s*(?=\{)", part)
        if named is None:
            calls += _values(part, len(part) - len(part.lstrip()))[0]
            continue
        try:
            arguments, _ = _DECODER.raw_decode(part, named.end())
            calls.append(ToolCall(named[1], json.dumps(arguments, ensure_ascii=False)))
        except (ValueError, RecursionError):
            continue
    return calls


HERMES = ToolParser("<tool_call>", _hermes)
PARSERS: dict[str, ToolParser] = {
    "hermes": HERMES,
    "qwen": HERMES,
    "llama3": ToolParser("<|python_tag|>", _llama3, bare=True),
    "mistral": ToolParser("[TOOL_CALLS]", _mistral),
}


def parser_for(name: str, template: str) -> ToolParser:
    """The parser of a name; of "auto", by the markers in the chat template.  Hermes if there is none."""
    if name != "auto":
        return PARSERS[name]
    if "[TOOL_CALLS]" in template:
        return PARSERS["mistral"]
    llama = "<|python_tag|>" in template or ("parameters" in template and "ipython" in template)
    return PARSERS["llama3"] if llama else HERMES
