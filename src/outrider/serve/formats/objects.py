"""Calls as JSON behind markers: <tool_call>{"name": "weather", "arguments": {"city": "Oslo"}}</tool_call>"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pydantic_core import from_json

from outrider.core.reasoning import held_back
from outrider.serve.tool_calls import (
    NAMED,
    STRING,
    Found,
    Pieces,
    Shape,
    ToolCall,
    Tools,
    between,
    end_of,
    found_in,
    text_of,
)


@dataclass(frozen=True)
class Objects:
    """Reader of one format.

    openings: markers that may come before a call.  closings: those that may come behind it.
    begin: pattern of an opening, up to the JSON.  With the groups `name` and `id`, the JSON is the arguments;
    otherwise it is calls of this shape, one or several with a separator (a pattern), maybe in a list.
    """

    begin: re.Pattern[str]
    openings: tuple[str, ...]
    closings: tuple[str, ...] = ()
    separator: str = ","
    shape: Shape = NAMED

    def __call__(self, text: str, _: Tools) -> Pieces:
        pieces: Pieces = []
        behind: int | None = None  # end of the last call
        begin = self.begin.search(text)
        while begin is not None:
            if behind is not None:
                pieces.append(between(text[behind : begin.start()], (), self.closings))
            found = self._found(text, begin)
            if not found.complete and not _is_unfinished(text[found.end :]):
                found, behind = self._broken(text, begin, found.end), None
            else:
                behind = found.end if found.complete and found.calls else None
            pieces += found.calls
            begin = self.begin.search(text, found.end) if behind is not None or found.complete else None
        if behind is not None:
            pieces.append(between(text[behind:], self.openings, self.closings))
        return pieces

    def _found(self, text: str, begin: re.Match[str]) -> Found:
        at = begin.end()
        given = begin.groupdict()
        if (name := given.get("name")) is None:
            found = found_in(text[at:], self.separator, self.shape)
            return found._replace(end=at + found.end)
        end, id = end_of(text[at:]), given.get("id") or ""
        if end is not None:
            return Found([ToolCall(name, text[at : at + end], id=id)], at + end, True)
        return Found([ToolCall(name, text[at:], False, id)], at, False)

    def _broken(self, text: str, begin: re.Match[str], at: int) -> Found:
        """The calls of an opening whose JSON is wrong from an index on: up to the next marker."""
        following = self.begin.search(text, max(at, begin.end()))
        stop = following.start() if following is not None else len(text)
        part = text[:stop]
        marks = [*self.closings, *self.openings]
        ends = [place for mark in marks if (place := part.find(mark, max(at, begin.end()))) >= 0]
        part = part[: min(ends)] if ends else held_back(part, marks)
        found = self._found(part, begin) if len(part) >= begin.end() else Found([], stop, False)
        return Found(found.calls, stop, following is not None)


def _is_unfinished(text: str) -> bool:
    """Whether a text is the beginning of a JSON object."""
    if not text.startswith("{"):
        return False
    try:
        from_json(text, allow_partial="trailing-strings", allow_inf_nan=False)
    except (ValueError, RecursionError):
        return False
    return True


def _by_key(value: Any) -> ToolCall | None:
    if not isinstance(value, Mapping) or len(value) != 1:
        return None
    ((name, arguments),) = value.items()
    return ToolCall(name, text_of(arguments))


BY_KEY = Shape(re.compile(rf"\{{\s*({STRING})\s*:\s*(?=\{{)"), _by_key)  # {"weather": {"city": "Oslo"}}


def behind(
    *openings: str, closings: tuple[str, ...] = (), separator: str = ",", shape: Shape = NAMED
) -> Objects:
    """A reader of JSON that follows one of these markers."""
    begin = re.compile("(?:" + "|".join(map(re.escape, openings)) + r")(?=\s*[\[{])")
    return Objects(begin, openings, closings, separator, shape)


def named(pattern: str, openings: tuple[str, ...], closings: tuple[str, ...]) -> Objects:
    """A reader of arguments in JSON that follow a name, as the pattern describes."""
    return Objects(re.compile(pattern + r"\s*(?=\{)"), openings, closings)
