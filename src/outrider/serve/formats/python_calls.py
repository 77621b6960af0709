"""Calls in Python's syntax, [weather(city="Oslo", days=3)], and in Gemma's, call:weather{days:3}."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from outrider.serve.formats.literals import Ended, Literals
from outrider.serve.formats.tags import kinds_of
from outrider.serve.tool_calls import Pieces, ToolCall, Tools, between

NAME = re.compile(r"\s*(?P<name>[A-Za-z_][\w.-]*)\s*\(")
KEY = re.compile(r"\s*(?P<key>[A-Za-z_]\w*)\s*=(?!=)\s*")
KEY_BEGUN = re.compile(r"\s*[A-Za-z_]\w*\s*$")
LIST, COMMA, CLOSED = re.compile(r"\s*\[?"), re.compile(r"\s*,?"), re.compile(r"\s*\]")
# a list of calls, or its beginning
BARE = re.compile(r"\s*\[\s*(?:[A-Za-z_][\w.-]*\s*(?:\(|$)|$)")


@dataclass(frozen=True)
class PythonCalls:
    """Reader of calls in Python's syntax, in a list or one a line.

    openings, closings: markers around them.
    """

    openings: tuple[str, ...] = ()
    closings: tuple[str, ...] = ()

    def __call__(self, text: str, tools: Tools) -> Pieces:
        pieces: Pieces = []
        at = 0
        while at >= 0:
            opening = next((mark for mark in self.openings if text.startswith(mark, at)), "")
            calls, at, closed = self._list(text, at + len(opening), tools)
            pieces += calls
            if not closed:
                return pieces
            following = min((i for mark in self.openings if (i := text.find(mark, at)) >= 0), default=-1)
            rest = text[at : following if following >= 0 else None]
            pieces.append(between(rest, (), self.closings))
            at = following
        return pieces

    def _list(self, text: str, at: int, tools: Tools) -> tuple[list[ToolCall], int, bool]:
        """Calls from an index on, where they end, and whether they are complete."""
        calls = list[ToolCall]()
        opening = LIST.match(text, at)
        assert opening is not None, "it matches every text"
        at = opening.end()
        while (head := NAME.match(text, at)) is not None:
            reader = Literals(text, head.end())
            call = _call(reader, head["name"], list(properties_of(tools.get(head["name"], {}))))
            calls.append(call)
            if not call.complete:
                return calls, at, False
            comma = COMMA.match(text, reader.at)
            assert comma is not None, "it matches every text"
            at = comma.end()
        if opening[0].endswith("["):
            closed = CLOSED.match(text, at)
            return calls, closed.end() if closed else at, closed is not None and bool(calls)
        rest = text[at:].lstrip()  # a name that is not complete may be another call's
        return calls, at, bool(calls) and rest.startswith(self.closings)


def _call(reader: Literals, name: str, properties: list[str]) -> ToolCall:
    """The call whose arguments begin at the reader's place.

    properties: names of the parameters, which arguments without a name take in turn.
    """
    count = 0

    def argument() -> None:
        nonlocal count
        key = reader.skip(KEY)
        if key is None and KEY_BEGUN.match(reader.text, reader.at):
            raise Ended  # the name of an argument may go on
        if key is None and count >= len(properties):
            raise Ended
        found = key["key"] if key is not None else properties[count]
        count += 1
        reader.made.append(f"{json.dumps(found, ensure_ascii=False)}: ")
        before = len(reader.made)
        try:
            reader.value()
        except Ended:
            if len(reader.made) == before:
                reader.made.pop()
            raise

    reader.made.append("{")
    try:
        reader.items(")", argument)
    except Ended:
        written = "".join(reader.made)
        return ToolCall(name, "" if written == "{" else written, False)
    return ToolCall(name, "".join(reader.made) + "}")


def properties_of(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    found = schema.get("properties")
    return found if isinstance(found, Mapping) else {}


@dataclass(frozen=True)
class GemmaCalls:
    """Reader of Gemma's calls.  quote: around strings.  opening, closing: markers of a call."""

    opening: str
    closing: str
    quote: str

    def __call__(self, text: str, tools: Tools) -> Pieces:
        pieces: Pieces = []
        head = re.compile(rf"{re.escape(self.opening)}\s*(?:call)?:\s*(?P<name>[\w.-]+)\s*(?={{)")
        begin = head.search(text)
        while begin is not None:
            schema = tools.get(begin["name"], {})
            known = {key: kinds_of(each, schema) for key, each in properties_of(schema).items()}
            reader = Literals(text, begin.end() + 1, (self.quote,), raw=True)
            reader.made.append("{")
            try:
                reader.items("}", partial(reader.pair, properties=known))
            except Ended:
                written = "".join(reader.made)
                return [*pieces, ToolCall(begin["name"], "" if written == "{" else written, False)]
            pieces.append(ToolCall(begin["name"], "".join(reader.made) + "}"))
            begin = head.search(text, reader.at)
            rest = text[reader.at : begin.start() if begin is not None else None]
            pieces.append(between(rest, (self.opening,), (self.closing,)))
        return pieces
