"""Tool calls in the text of a model: the formats of Hermes and Qwen, Llama 3 and Mistral."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple


def _refused(number: str) -> Any:
    raise ValueError(f"{number} is no JSON")


_DECODER = json.JSONDecoder(parse_constant=_refused)
# the beginning of a call as models write it, up to the brace of its arguments
_HEAD = re.compile(r'\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)')


class ToolCall(NamedTuple):
    """name: of the function.  arguments: JSON text, as the model wrote it if they come last.

    complete: False while the arguments go on.
    """

    name: str
    arguments: str
    complete: bool = True


class Parsed(NamedTuple):
    """content: text that is no call.  calls: of a text that is not finished, the last one may go on."""

    content: str
    calls: list[ToolCall]


class Found(NamedTuple):
    """calls: those in a text.  behind: the texts behind them."""

    calls: list[ToolCall]
    behind: list[str]


@dataclass(frozen=True)
class ToolParser:
    """One format.

    marker: where calls begin.  bare: a text that begins with `{` is a call, too.
    read: text from the first marker on -> its calls.
    """

    marker: str
    read: Callable[[str], Found]
    bare: bool = False

    def parse(self, text: str, finished: bool, names: Container[str] | None = None) -> Parsed:
        """Content and calls.  Of a text that is not finished, content that may become a marker is withheld.

        A finished text without a complete call is content.
        names: functions; a bare object that calls none of them is content.
        """
        start, bare = text.find(self.marker), False
        if self.bare and start < 0 and text.lstrip().startswith("{"):
            start, bare = len(text) - len(text.lstrip()), True
        if start < 0:
            return Parsed(text if finished else self._certain(text).rstrip(), [])  # space before a marker
        calls, behind = self.read(text[start:])
        calls = [call for call in calls if call.complete or not finished]
        if bare and names is not None:
            calls = [call for call in calls if call.name in names]
        if not calls and (finished or bare):
            return Parsed(text if finished else "", [])
        content = text[:start].rstrip()
        for part in behind:
            if part := (part if finished else self._certain(part)).strip():
                content += f"\n{part}" if content else part
        return Parsed(content, calls)

    def _certain(self, text: str) -> str:
        """The text without an end that may become a marker."""
        most = min(len(text), len(self.marker) - 1)
        held = next((n for n in range(most, 0, -1) if self.marker.startswith(text[-n:])), 0)
        return text[: len(text) - held]


def call_at(text: str, at: int, strict: bool = False) -> tuple[ToolCall | None, int]:
    """The call of a JSON object at an index of the text, and where it ends: -1 if it is not complete.

    strict: an object without arguments is no call.
    """
    head = _HEAD.match(text, at)
    try:
        value, end = _DECODER.raw_decode(text, at)
        if head is None:
            return _call(value, strict), end
        return ToolCall(json.loads(head[1]), text[head.end() : _DECODER.raw_decode(text, head.end())[1]]), end
    except (ValueError, RecursionError):
        return (_open_call(json.loads(head[1]), text[head.end() :]) if head else None), -1


def _open_call(name: str, text: str) -> ToolCall:
    """A call that goes on, with a text that begins with its arguments."""
    try:
        return ToolCall(name, text[: _DECODER.raw_decode(text)[1]], False)
    except (ValueError, RecursionError):
        return ToolCall(name, text, False)


def _call(value: Any, strict: bool) -> ToolCall | None:
    if not isinstance(value, Mapping) or not isinstance(value.get("name"), str):
        return None
    if strict and not ("arguments" in value or "parameters" in value):
        return None
    arguments = value.get("arguments", value.get("parameters", {}))
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return ToolCall(value["name"], text)


def calls_in(text: str, at: int, separator: str, strict: bool = False) -> tuple[list[ToolCall], int]:
    """The calls from an index on, with a separator between two, and where the last ends: -1 if it goes on."""
    calls: list[ToolCall] = []
    between = re.compile(rf"\s*{separator}\s*")
    while True:
        call, end = call_at(text, at, strict)
        calls += [] if call is None else [call]
        follows = between.match(text, end) if end >= 0 else None
        if follows is None:
            return calls, end
        at = follows.end()


def listed(text: str) -> Found:
    """The calls of a JSON list, or of a single object."""
    at = len(text) - len(text.lstrip())
    is_list = text.startswith("[", at)
    calls, end = calls_in(text, len(text) - len(text[at + 1 :].lstrip()) if is_list else at, ",")
    closing = re.compile(r"\s*\]").match(text, end) if is_list and end >= 0 else None
    end = closing.end() if closing else -1 if is_list else end
    return Found(calls, [text[end:]] if calls and end >= 0 else [])


def _hermes(text: str) -> Found:
    """<tool_call>{"name": …, "arguments": {…}}</tool_call>, several times."""
    calls, behind = list[ToolCall](), list[str]()
    for part in text.split("<tool_call>")[1:]:
        found = listed(part)
        calls += found.calls
        behind += [rest.strip().removeprefix("</tool_call>") for rest in found.behind if _closed(rest)]
    return Found(calls, behind)


def _closed(rest: str) -> bool:
    """Whether the text behind a call is more than the beginning of its closing marker."""
    return not "</tool_call>".startswith(rest.strip())


def _llama3(text: str) -> Found:
    """<|python_tag|>{"name": …, "parameters": {…}}; several are separated by semicolons."""
    begins = re.match(r"(<\|python_tag\|>)?\s*", text)
    calls, end = calls_in(text, begins.end() if begins else 0, ";", strict=True)
    return Found(calls, [text[end:].lstrip("; ")] if calls and end >= 0 else [])


def _mistral(text: str) -> Found:
    """[TOOL_CALLS][{"name": …, "arguments": {…}}], or [TOOL_CALLS]name[ARGS]{…}, several times."""
    calls, behind = list[ToolCall](), list[str]()
    for part in text.split("[TOOL_CALLS]")[1:]:
        named = re.match(r"\s*([\w.-]+)\s*(?:\[CALL_ID\]\s*\w+\s*)?(?:\[ARGS\])?\s*(?=\{)", part)
        found = _named(named[1], part[named.end() :]) if named else listed(part)
        calls += found.calls
        behind += found.behind
    return Found(calls, behind)


def _named(name: str, text: str) -> Found:
    """A call whose arguments are the JSON object at the beginning of a text."""
    try:
        _, end = _DECODER.raw_decode(text)
    except (ValueError, RecursionError):
        return Found([ToolCall(name, text, False)], [])
    return Found([ToolCall(name, text[:end])], [text[end:]])


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
