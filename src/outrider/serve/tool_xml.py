"""Tool calls in the tags of Qwen3-Coder.

<tool_call>
<function=weather>
<parameter=city>
Oslo
</parameter>
</function>
</tool_call>

Models leave the outer tags out sometimes: then, it is a call if it names one of the tools.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from outrider.serve.tool_calls import Pieces, ToolCall, Tools, end_of, unmarked

HEAD = re.compile(r"(<tool_call>\s*)?<function=([^>\s]+)>")
BEGUN = re.compile(r"<tool_call>|<function=[^>\s]*$")  # of a call whose head is not complete
PARAMETER = re.compile(r"\s*<parameter=([^>\s]+)>\n?")
CLOSED, NEXT = "</parameter>", "\n<parameter="
END = re.compile(r"\s*</function>")
PYTHON = {"True": "true", "False": "false", "None": "null"}  # as models write them, too
MOST_REFS = 16  # references of a schema in a row
KINDS = {str: "string", bool: "boolean", int: "integer", float: "number", list: "array", dict: "object"}


def read_xml(text: str, tools: Tools) -> Pieces:
    """The calls of a text, and what is between them.  A parameter may contain any tag but its own end."""
    pieces: Pieces = []
    head = _head(text, 0, tools)
    if head is not None:
        pieces.append(text[: head.start()].removeprefix("<tool_call>"))  # of tags that call no tool
    while head is not None:
        values, at = _parameters(text, head.end())
        end = END.match(text, at)
        arguments = _arguments(values, tools.get(head[2], {}), end is not None)
        pieces.append(ToolCall(head[2], arguments, end is not None))
        if end is None:
            return pieces
        head = _head(text, end.end(), tools)
        between = text[end.end() : head.start() if head is not None else None]
        pieces.append(unmarked(BEGUN.split(between, maxsplit=1)[0]))
    return pieces


def _head(text: str, at: int, tools: Tools) -> re.Match[str] | None:
    """The next beginning of a call."""
    for head in HEAD.finditer(text, at):
        if head[1] or not tools or head[2] in tools:
            return head
    return None


def _parameters(text: str, at: int) -> tuple[dict[str, str], int]:
    """The complete parameters from an index on, and where they end.  The end of one may be missing."""
    values = dict[str, str]()
    while (parameter := PARAMETER.match(text, at)) is not None:
        start = parameter.end()
        end, following = text.find(CLOSED, start), text.find(NEXT, start)
        if following >= 0 and (end < 0 or following < end):
            end, at = following, following
        elif end >= 0:
            at = end + len(CLOSED)
        else:
            break
        values.setdefault(parameter[1], text[start:end].removesuffix("\n"))
    return values, at


def _arguments(values: Mapping[str, str], schema: Mapping[str, Any], complete: bool) -> str:
    """JSON of the parameters, as far as they are complete; what is a string is told by the schema."""
    properties = schema.get("properties")
    known = properties if isinstance(properties, Mapping) else {}
    parts = [f"{json.dumps(key)}: {_json(value, known.get(key), schema)}" for key, value in values.items()]
    begun = "{" + ", ".join(parts) if parts or complete else ""
    return begun + "}" if complete else begun


def _json(value: str, schema: Any, root: Mapping[str, Any]) -> str:
    """A value as JSON: itself if its schema allows that, or allows no text; otherwise as a text."""
    written, kinds = PYTHON.get(value.strip(), value.strip()), kinds_of(schema, root) or {"string"}
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
