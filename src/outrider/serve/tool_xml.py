"""Tool calls in the tags of Qwen3-Coder.

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
from collections.abc import Mapping
from typing import Any

from outrider.serve.tool_calls import Pieces, ToolCall, Tools, end_of, unmarked

HEAD = re.compile(r"<tool_call>\s*<function=([^>\s]+)>")
PARAMETER = re.compile(r"\s*<parameter=([^>\s]+)>\n?(.*?)\n?</parameter>", re.DOTALL)
PYTHON = {"True": "true", "False": "false", "None": "null"}  # as models write them, too
END = re.compile(r"\s*</function>")


def read_xml(text: str, tools: Tools) -> Pieces:
    """The calls of a text, and what is between them.  A parameter may contain any tag but its own end."""
    pieces: Pieces = []
    head = HEAD.search(text)
    while head is not None:
        at, values = head.end(), dict[str, str]()
        while parameter := PARAMETER.match(text, at):
            values[parameter[1]] = parameter[2]
            at = parameter.end()
        end = END.match(text, at)
        arguments = _arguments(values, tools.get(head[1], {}), end is not None)
        pieces.append(ToolCall(head[1], arguments, end is not None))
        if end is None:
            return pieces
        head = HEAD.search(text, end.end())
        between, _, _ = text[end.end() : head.start() if head is not None else None].partition("<tool_call>")
        pieces.append(unmarked(between))
    return pieces


def _arguments(values: Mapping[str, str], schema: Mapping[str, Any], complete: bool) -> str:
    """JSON of the parameters, as far as they are complete; what is a string is told by the schema."""
    properties = schema.get("properties")
    known = properties if isinstance(properties, Mapping) else {}
    parts = [f"{json.dumps(key)}: {_json(value, known.get(key))}" for key, value in values.items()]
    begun = "{" + ", ".join(parts) if parts or complete else ""
    return begun + "}" if complete else begun


def _json(value: str, schema: Any) -> str:
    kind = schema.get("type", "string") if isinstance(schema, Mapping) else "string"
    written = PYTHON.get(value.strip(), value.strip())
    if kind == "string" or end_of(written) != len(written):
        return json.dumps(value, ensure_ascii=False)
    return written
