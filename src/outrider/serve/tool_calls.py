"""Tool calls in the text of a model, and what their formats share."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from outrider.core.reasoning import first_of, held_back


def _refused(number: str) -> Any:
    raise ValueError(f"{number} is no JSON")


_DECODER = json.JSONDecoder(parse_constant=_refused)
MOST_PARSES = 256  # of a call while its text doubles, about
STRING = r'"(?:[^"\\]|\\.)*"'


class ToolCall(NamedTuple):
    """name: of the function.  arguments: JSON text, as the model wrote it if they come last.

    complete: False while the arguments are incomplete.  id: that the model gave it, or that its chat template
    demands; "" if it may have any.
    """

    name: str
    arguments: str
    complete: bool = True
    id: str = ""


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


@dataclass
class ParseSchedule:
    """When the growing text of a choice is parsed again: not at each token of a long call.

    A parse begins at the beginning of the text, so that one for each token would take quadratic time.
    length: that the text has at the next time.
    """

    length: int = 0

    def due(self, text: str, finished: bool) -> bool:
        return finished or len(text) >= self.length

    def parsed(self, text: str, calls: Sequence[ToolCall]) -> None:
        """Set the next time by the calls that the text has now."""
        within_call = bool(calls) and not calls[-1].complete
        self.length = len(text) + len(text) // MOST_PARSES if within_call else 0


Pieces = list[ToolCall | str]  # calls and the texts behind them, in their order
Tools = Mapping[str, Mapping[str, Any]]  # name of a function -> JSON schema of its parameters


@dataclass(frozen=True)
class ToolParser:
    """One format.

    markers: where calls begin.  bare: pattern of a text that may be calls without a marker.
    read: text from the first marker on, and the tools -> its calls and other texts.
    new_id: name of a function, number of the call in its conversation and a text of its own -> an id that the
    chat template accepts.  None: it accepts any.
    """

    markers: tuple[str, ...]
    read: Callable[[str, Tools], Pieces]
    bare: re.Pattern[str] | None = None
    new_id: Callable[[str, int, str], str] | None = None

    def parse(self, text: str, finished: bool, tools: Tools | None = None) -> Parsed:
        """Content and calls.  Of a text that is not finished, an end that may become a marker is withheld.

        A call that has begun stays one, also if the text ends within it.  A finished text without a call is
        content.  tools: a bare text that calls none of them is content; None: they are not known.
        """
        known = tools or {}
        if not finished:
            text = held_back(text, self.markers)
        is_bare = self.bare is not None and self.bare.match(text) is not None
        if is_bare:
            pieces = self.read(text, known)
            if tools is not None:
                pieces = [piece for piece in pieces if isinstance(piece, str) or piece.name in tools]
            if any(isinstance(piece, ToolCall) for piece in pieces):
                return _joined("", pieces)
        start = first_of(self.markers, text)
        if start >= 0:
            found = _joined(text[:start].rstrip(), self.read(text[start:], known))
            return found if found.calls or not finished else Parsed(text, [])
        if finished:
            return Parsed(text, [])
        return Parsed("" if is_bare else text.rstrip(), [])  # a marker may follow the space


def between(text: str, openings: Iterable[str], closings: Iterable[str]) -> str:
    """The text behind a call: up to the next opening marker, without the closing ones in front of it.

    closings: an end that may become one of them is left out, too.
    """
    ends = [at for marker in openings if (at := text.find(marker)) >= 0]
    rest = text[: min(ends, default=len(text))].strip()
    marks = [*closings]
    while (mark := next(filter(rest.startswith, marks), None)) is not None:
        rest = rest[len(mark) :].strip()
    return "" if any(mark.startswith(rest) for mark in marks) else rest


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


class Shape(NamedTuple):
    """A way to write a call as a JSON object.

    head: its beginning, as models write it, up to the brace of the arguments; group 1 is the name.
    call: of the whole object, whose keys may be in another order; None if it is no call.
    """

    head: re.Pattern[str]
    call: Callable[[Any], ToolCall | None]


def _call(value: Any) -> ToolCall | None:
    if not isinstance(value, Mapping):
        return None
    name = value.get("name", value.get("tool_name"))
    if not isinstance(name, str):
        return None
    return ToolCall(name, text_of(value.get("arguments", value.get("parameters", {}))))


def _strict_call(value: Any) -> ToolCall | None:
    given = isinstance(value, Mapping) and ("arguments" in value or "parameters" in value)
    return _call(value) if given else None


def text_of(arguments: Any) -> str:
    """JSON of arguments, which may be JSON in a string."""
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)


_HEAD = re.compile(
    rf'\{{\s*(?:"(?:type|id|tool_call_id)"\s*:\s*{STRING}\s*,\s*)*"(?:tool_)?name"\s*:\s*({STRING})\s*,'
    rf'\s*"(?:arguments|parameters)"\s*:\s*(?=\{{)'
)
NAMED = Shape(_HEAD, _call)  # {"name": …, "arguments": {…}}
STRICT = Shape(_HEAD, _strict_call)  # the same, if it has arguments


class Found(NamedTuple):
    """calls: of a text.  end: of the last one that is complete.  complete: all of them are."""

    calls: list[ToolCall]
    end: int
    complete: bool


def call_at(text: str, at: int, shape: Shape = NAMED) -> tuple[ToolCall | None, int]:
    """The call of a JSON object at an index of the text, and where it ends: -1 if it is not complete."""
    head = shape.head.match(text, at)
    try:
        name = json.loads(head[1]) if head else ""
    except ValueError:
        return None, -1
    try:
        value, end = _DECODER.raw_decode(text, at)
        if head is None:
            return shape.call(value), end
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


def calls_in(text: str, at: int, separator: str, shape: Shape = NAMED) -> Found:
    """The calls from an index on, with a separator (a pattern) between two."""
    calls: list[ToolCall] = []
    follows = re.compile(rf"\s*{separator}\s*(?=\{{)")
    while True:
        call, end = call_at(text, at, shape)
        calls += [] if call is None else [call]
        if end < 0:
            return Found(calls, at, False)
        if (following := follows.match(text, end)) is None:
            return Found(calls, end, True)
        at = following.end()


def listed(text: str, separator: str = ",", shape: Shape = NAMED) -> Pieces:
    """The calls of a JSON list, or of a single object."""
    found = found_in(text, separator, shape)
    return [*found.calls, text[found.end :]] if found.calls and found.complete else [*found.calls]


def found_in(text: str, separator: str = ",", shape: Shape = NAMED) -> Found:
    """The calls of a JSON list at the beginning of a text, or of single objects."""
    opening = re.match(r"\s*(\[?)\s*", text)
    assert opening is not None, "it matches every text"
    found = calls_in(text, opening.end(), separator, shape)
    if opening[1] and found.complete:
        closing = re.compile(r"\s*\]").match(text, found.end)
        return found._replace(end=closing.end()) if closing else found._replace(complete=False)
    return found
