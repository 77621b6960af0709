"""Tool calls in the text of a model, and what their formats share."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from outrider.core.reasoning import without_beginning


def _refused(number: str) -> Any:
    raise ValueError(f"{number} is no JSON")


_DECODER = json.JSONDecoder(parse_constant=_refused)
# the beginning of a call as models write it, up to the brace of its arguments
_HEAD = re.compile(r'\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)')


class ToolCall(NamedTuple):
    """name: of the function.  arguments: JSON text, as the model wrote it if they come last.

    complete: False while the arguments are incomplete.
    """

    name: str
    arguments: str
    complete: bool = True


class Parsed(NamedTuple):
    """content: text that is no call.  calls_before: calls in front of the content.

    lead: characters of the content in front of the first call, if there is one.
    reasoning: what the model thought before both.  start: of the rest in its text.
    """

    content: str
    calls: list[ToolCall]
    calls_before: int = 0
    reasoning: str = ""
    start: int = 0
    lead: int = 0

    def only(self, names: Container[str]) -> Parsed:
        """The same without calls of other functions."""
        before = sum(call.name in names for call in self.calls[: self.calls_before])
        calls = [call for call in self.calls if call.name in names]
        return self._replace(calls=calls, calls_before=before)


Pieces = list[ToolCall | str]  # calls and the texts behind them, in their order
Tools = Mapping[str, Mapping[str, Any]]  # name of a function -> JSON schema of its parameters


@dataclass(frozen=True)
class ToolParser:
    """One format.

    markers: where calls begin.  bare: a text that begins with `{` is a call, too.
    read: text from the first marker on, and the tools -> its calls and other texts.
    """

    markers: tuple[str, ...]
    read: Callable[[str, Tools], Pieces]
    bare: bool = False

    def parse(self, text: str, finished: bool, tools: Tools | None = None) -> Parsed:
        """Content and calls.  Of a text that is not finished, an end that may become a marker is withheld.

        A call that has begun stays one, also if the text ends within it.  A finished text without a call is
        content.  tools: a bare object that calls none of them is content; None: they are not known.
        """
        known = tools or {}
        if not finished:
            text = min((without_beginning(text, marker) for marker in self.markers), key=len)
        is_bare = self.bare and text.lstrip().startswith("{")
        if is_bare:
            pieces = self.read(text, known)
            if tools is not None:
                pieces = [piece for piece in pieces if isinstance(piece, str) or piece.name in tools]
            if any(isinstance(piece, ToolCall) for piece in pieces):
                return _joined("", pieces)
        start = min((at for marker in self.markers if (at := text.find(marker)) >= 0), default=-1)
        if start >= 0:
            found = _joined(text[:start].rstrip(), self.read(text[start:], known))
            return found if found.calls or not finished else Parsed(text, [])
        if finished:
            return Parsed(text, [])
        return Parsed("" if is_bare else text.rstrip(), [])  # a marker may follow the space


def _joined(content: str, pieces: Pieces) -> Parsed:
    """Calls, and the content in front of them with the other texts."""
    calls, before, lead = list[ToolCall](), 0, len(content)
    for piece in pieces:
        if isinstance(piece, ToolCall):
            calls.append(piece)
        elif part := piece.strip():
            before = before if content else len(calls)
            content += f"\n{part}" if content else part
            lead = lead if calls else len(content)
    return Parsed(content, calls, before, lead=lead)


def call_at(text: str, at: int, strict: bool = False) -> tuple[ToolCall | None, int]:
    """The call of a JSON object at an index of the text, and where it ends: -1 if it is not complete.

    strict: an object without arguments is no call.
    """
    head = _HEAD.match(text, at)
    try:
        name = json.loads(head[1]) if head else ""
    except ValueError:
        return None, -1
    try:
        value, end = _DECODER.raw_decode(text, at)
        if head is None:
            return _call(value, strict), end
        return ToolCall(name, text[head.end() : _DECODER.raw_decode(text, head.end())[1]]), end
    except (ValueError, RecursionError):
        given = text[head.end() :] if head else ""
        return (ToolCall(name, given[: end_of(given)], False) if head else None), -1


def end_of(text: str) -> int | None:
    """Length of the JSON value at the beginning of a text; None if it is not complete."""
    try:
        return _DECODER.raw_decode(text)[1]
    except (ValueError, RecursionError):
        return None


def _call(value: Any, strict: bool) -> ToolCall | None:
    if not isinstance(value, Mapping) or not isinstance(value.get("name"), str):
        return None
    if strict and not ("arguments" in value or "parameters" in value):
        return None
    arguments = value.get("arguments", value.get("parameters", {}))
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return ToolCall(value["name"], text)


def calls_in(text: str, at: int, separator: str, strict: bool = False) -> tuple[list[ToolCall], int]:
    """The calls from an index on, with a separator between two, and the end of the last: -1 if incomplete."""
    calls: list[ToolCall] = []
    between = re.compile(rf"\s*{separator}\s*")
    while True:
        call, end = call_at(text, at, strict)
        calls += [] if call is None else [call]
        follows = between.match(text, end) if end >= 0 else None
        if follows is None:
            return calls, end
        at = follows.end()


def listed(text: str) -> Pieces:
    """The calls of a JSON list, or of a single object."""
    opening = re.match(r"\s*(\[?)\s*", text)
    assert opening is not None, "it matches every text"
    calls, end = calls_in(text, opening.end(), ",")
    if opening[1] and end >= 0:
        closing = re.compile(r"\s*\]").match(text, end)
        end = closing.end() if closing else -1
    return [*calls, text[end:]] if calls and end >= 0 else [*calls]


def unmarked(rest: str) -> str:
    """The text behind a call without its closing marker, or the beginning of that."""
    rest = rest.strip()
    return "" if "</tool_call>".startswith(rest) else rest.removeprefix("</tool_call>")
