"""Calls in tags, such as those of Qwen3-Coder.

<tool_call>
<function=weather>
<parameter=city>
Oslo
</parameter>
</function>
</tool_call>
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from outrider.core.reasoning import held_back
from outrider.serve.tool_calls import Pieces, ToolCall, Tools, between, end_of

PYTHON = {"True": "true", "False": "false", "None": "null"}  # as models write them, too
MOST_REFS = 16  # references of a schema in a row
KINDS = {str: "string", bool: "boolean", int: "integer", float: "number", list: "array", dict: "object"}


class Value(NamedTuple):
    """A parameter.  is_text: whether its tag calls it one; None: its schema decides.
    closed: it is complete."""

    key: str
    text: str
    is_text: bool | None
    closed: bool = True


@dataclass(frozen=True)
class Tags:
    """Reader of one format.

    head: pattern of a call's beginning, with the group `name`.  If it has a group `outer` that is empty, it
    is a call only if it names one of the tools: models leave outer tags out sometimes.
    begun: pattern of a head that is not complete, or of what is in front of one.
    parameter: pattern of a parameter up to its value, with the groups `key` and maybe `text`: whether the
    value is a text ("true") or JSON.  closed: the end of a value.  following: where it ends without that.
    end: pattern of a call's end.  openings, closings: markers around calls.
    lines: a line break at the beginning and the end of a value is no part of it.
    """

    head: re.Pattern[str]
    begun: re.Pattern[str]
    parameter: re.Pattern[str]
    closed: str
    end: re.Pattern[str]
    openings: tuple[str, ...]
    closings: tuple[str, ...]
    following: str = ""
    lines: bool = True

    def __call__(self, text: str, tools: Tools) -> Pieces:
        """The calls of a text, and what is between them.  A parameter may contain any tag but its own end."""
        pieces: Pieces = []
        head = self._head(text, 0, tools)
        if head is not None:  # behind tags that call no tool
            pieces.append(between(text[: head.start()], (), self.openings))
        while head is not None:
            name = head["name"].strip()
            schema = tools.get(name, {})
            values, at = self._values(text, head.end())
            end = self.end.match(text, at)
            pieces.append(ToolCall(name, _arguments(values, schema, end is not None), end is not None))
            if end is None:
                return pieces
            head = self._head(text, end.end(), tools)
            rest = text[end.end() : head.start() if head is not None else None]
            rest = self.begun.split(rest, maxsplit=1)[0]
            pieces.append(between(rest, (), (*self.closings, *self.openings)))
        return pieces

    def _head(self, text: str, at: int, tools: Tools) -> re.Match[str] | None:
        """The next beginning of a call."""
        for head in self.head.finditer(text, at):
            if head.groupdict().get("outer", "-") or not tools or head["name"] in tools:
                return head
        return None

    def _values(self, text: str, at: int) -> tuple[list[Value], int]:
        """The parameters from an index on, and where the last one that is complete ends."""
        values = dict[str, Value]()
        for value, end in self._parameters(text, at):
            values.setdefault(value.key, value)
            at = end
        return [*values.values()], at

    def _parameters(self, text: str, at: int) -> Iterator[tuple[Value, int]]:
        """Each parameter and its end.  The last one may not be complete: then its end is its beginning."""
        while (parameter := self.parameter.match(text, at)) is not None:
            start, begin = parameter.end(), at
            end = text.find(self.closed, start)
            following = text.find(self.following, start) if self.following else -1
            closed, at = end >= 0, end + len(self.closed)
            if following >= 0 and (end < 0 or following < end):
                closed, end, at = True, following, following
            value = text[start:end] if closed else held_back(text[start:], self._ends)
            if self.lines:
                value = value.removeprefix("\n").removesuffix("\n")
            kind = parameter.groupdict().get("text")
            is_text = None if kind is None else kind == "true"
            yield Value(parameter["key"].strip(), value, is_text, closed), at if closed else begin
            if not closed:
                return

    @property
    def _ends(self) -> tuple[str, ...]:
        """What may be withheld at the end of a value that is not complete."""
        ends = (self.closed, self.following) if self.following else (self.closed,)
        return (*ends, *(f"\n{end}" for end in ends)) if self.lines else ends


def _arguments(values: list[Value], schema: Mapping[str, Any], complete: bool) -> str:
    """JSON of the parameters, as far as they are complete; of a text, what is there."""
    properties = schema.get("properties")
    known = properties if isinstance(properties, Mapping) else {}
    parts = list[str]()
    for value in values:
        kinds = {"string"} if value.is_text else kinds_of(known.get(value.key), schema) or {"string"}
        key = json.dumps(value.key, ensure_ascii=False)
        if value.closed:
            written = _json(value.text, kinds) if value.is_text is not False else _given(value.text)
            parts.append(f"{key}: {written}")
        elif kinds == {"string"} and value.is_text is not False:
            parts.append(f"{key}: {json.dumps(value.text, ensure_ascii=False)[:-1]}")
    begun = "{" + ", ".join(parts) if parts or complete else ""
    return begun + "}" if complete else begun


def _given(text: str) -> str:
    """A value that its tag calls JSON; a text if it is none."""
    written = text.strip()
    return written if written and end_of(written) == len(written) else json.dumps(text, ensure_ascii=False)


def _json(value: str, kinds: set[str]) -> str:
    """A value as JSON: itself if these types allow that, or allow no text; otherwise as a text."""
    written = PYTHON.get(value.strip(), value.strip())
    if written and end_of(written) == len(written):
        found = _kind(json.loads(written))
        fits = found in kinds or (found == "integer" and "number" in kinds)
        if "string" not in kinds or (fits and found != "string"):
            return written
    return json.dumps(value, ensure_ascii=False)


def _kind(value: Any) -> str:
    return "null" if value is None else KINDS[type(value)]


def kinds_of(schema: Any, root: Mapping[str, Any], depth: int = 0) -> set[str]:
    """Types that a schema allows, by the names of JSON schema; empty if it does not say."""
    if not isinstance(schema, Mapping) or depth > MOST_REFS:
        return set()
    given, values = schema.get("type"), schema.get("enum")
    found = (
        {given} if isinstance(given, str) else {*map(str, given)} if isinstance(given, list) else set[str]()
    )
    found |= {_kind(value) for value in (values if isinstance(values, list) else ())}
    found |= {_kind(schema["const"])} if "const" in schema else set[str]()
    for word in ("anyOf", "oneOf", "allOf"):
        for part in schema[word] if isinstance(schema.get(word), list) else ():
            found |= kinds_of(part, root, depth + 1)
    place = schema.get("$ref")
    if isinstance(place, str) and place.startswith("#/"):
        target: Any = root
        for name in place[2:].split("/"):
            target = target.get(name) if isinstance(target, Mapping) else None
        found |= kinds_of(target, root, depth + 1)
    return found


def _quoted(outer: str, prefix: str = "", parameter: str = "parameter", end: str = "invoke") -> Tags:
    """Tags with quoted names: <invoke name="weather"><parameter name="city">Oslo</parameter></invoke>"""
    own = re.escape(prefix)
    return Tags(
        re.compile(rf'<{own}{end}\s+name="(?P<name>[^"]+)"\s*>'),
        re.compile(rf"<{own}{end}\b|{re.escape(outer)}"),
        re.compile(rf'\s*<{own}{parameter}\s+name="(?P<key>[^"]+)"(?:\s+string="(?P<text>\w+)")?\s*>'),
        f"</{prefix}{parameter}>",
        re.compile(rf"\s*</{own}{end}>"),
        (outer,),
        (f"</{outer[1:]}", f"<{prefix}{end}"),  # and what the next call begins with
        lines=not prefix.startswith("｜"),
    )


def _equal(outer: str) -> Tags:
    """Qwen3-Coder's tags: <function=weather><parameter=city>Oslo</parameter></function>"""
    return Tags(
        re.compile(rf"(?P<outer>{outer}\s*)?<function=(?P<name>[^<>\s]+)>"),
        re.compile(rf"{outer}|<function=[^<>\s]*$"),
        re.compile(r"\s*<parameter=(?P<key>[^>\s]+)>"),
        "</parameter>",
        re.compile(r"\s*</function>"),
        (outer,),
        (f"</{outer[1:]}",),
        following="\n<parameter=",
    )


QWEN3, SEED = _equal("<tool_call>"), _equal("<seed:tool_call>")
MINIMAX = _quoted("<minimax:tool_call>")
# <｜DSML｜parameter name="city" string="true">Oslo</｜DSML｜parameter>
DEEPSEEK_V32 = _quoted("<｜DSML｜function_calls>", "｜DSML｜")
DEEPSEEK_V4 = _quoted("<｜DSML｜tool_calls>", "｜DSML｜")
STEP3_MARKERS = ("<｜tool_calls_begin｜>", "<｜tool_call_begin｜>")
STEP3 = replace(
    _quoted(STEP3_MARKERS[0], "steptml:"),
    head=re.compile(r'function<｜tool_sep｜>\s*<steptml:invoke\s+name="(?P<name>[^"]+)"\s*>'),
    begun=re.compile("<｜tool_calls?_begin｜>|function<｜tool_sep｜>"),
    openings=STEP3_MARKERS,
    closings=("<｜tool_call_end｜>", "<｜tool_calls_end｜>"),
)
# <function name="weather"><param name="city">Oslo</param></function>
MINICPM = replace(_quoted("<function ", "", "param", "function"), openings=(), closings=())
GLM_END = "</tool_call>"
# <tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Oslo</arg_value>\n</tool_call>
GLM = Tags(
    re.compile(
        r"<tool_call>\s*(?P<name>[^\s<>{}]+)(?:[ \t]*(?=\n)|\s*(?=<arg_key>|</tool_call>)|\s*<tool_sep>)"
    ),
    re.compile("<tool_call>"),
    re.compile(r"\s*<arg_key>(?P<key>[^<]*)</arg_key>\s*<arg_value>"),
    "</arg_value>",
    re.compile(rf"\s*{GLM_END}"),
    ("<tool_calls>", "<tool_call>"),
    (GLM_END, "</tool_calls>"),
)
