"""Fault and place in a schema, regular expression or grammar that the library refuses."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

# Keywords of JSON schema whose value is a schema, a list of schemas, or a dict of them.
ONE = (
    "items", "additionalProperties", "contains", "not", "if", "then", "else", "propertyNames",
    "unevaluatedItems", "unevaluatedProperties", "additionalItems",
)  # fmt: skip
LISTS = ("prefixItems", "anyOf", "oneOf", "allOf", "items")
DICTS = ("properties", "patternProperties", "dependentSchemas")
SHARED = ("$defs", "definitions")  # a part needs them for its references
UNSUPPORTED = "Unimplemented keys: "
PANIC = "panic: "
SEARCH_SECONDS = 1.0  # for the place of a fault: a schema may have a million parts


def place_of(schema: Mapping[str, Any], fault: str, fault_of: Callable[[Any], str | None]) -> str:
    """JSON pointer of the innermost part that alone has the fault, or of one around it after SEARCH_SECONDS.

    fault_of: None for a good schema.
    """
    deadline = time.monotonic() + SEARCH_SECONDS
    place, shared = "#", {name: schema[name] for name in SHARED if name in schema}
    while True:
        for step, part in parts(schema):
            if time.monotonic() > deadline:
                return place
            if fault_of({**part, **shared}) == fault:
                place, schema = place + step, part
                break
        else:
            return place


def parts(schema: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """The schemas directly inside a schema, each with the step of the JSON pointer that leads to it."""
    inside: dict[str, Any] = {}
    for name in (*SHARED, *DICTS):
        if isinstance(schema.get(name), Mapping):
            inside |= {f"/{name}/{escaped(key)}": part for key, part in schema[name].items()}
    inside |= {f"/{name}": schema.get(name) for name in ONE}
    for name in LISTS:
        if isinstance(schema.get(name), list):
            inside |= {f"/{name}/{i}": part for i, part in enumerate(schema[name])}
    yield from ((step, part) for step, part in inside.items() if isinstance(part, Mapping))


def escaped(key: str) -> str:
    """A key as a part of a JSON pointer (RFC 6901)."""
    return str(key).replace("~", "~0").replace("/", "~1")


def readable(message: str) -> str:
    """The library's message as one sentence: keywords by name, and places as line and column."""
    if message.startswith(UNSUPPORTED):
        names = json.loads(message.removeprefix(UNSUPPORTED).splitlines()[0])
        several = len(names) > 1
        return f"{', '.join(names)} {'are' if several else 'is'} not supported"
    if "regex parse error" in message:
        return _regex_fault(message)
    first, *_ = message.splitlines()
    if first.startswith(PANIC):  # a limit that the library asserts
        return f"it is too large, with the error: {first.removeprefix(PANIC)}"
    found = re.match(r"(?:at )?(\d+)\((\d+)\): (.*)", first)
    return f"{found[3]} at line {found[1]}, column {found[2]}" if found else first


def _regex_fault(message: str) -> str:
    """Fault and column from the regex library's drawing: the pattern indented by four, a caret below it."""
    lines = message.splitlines()
    fault = next((line.removeprefix("error: ") for line in lines if line.startswith("error: ")), lines[0])
    caret = next((line for line in lines if re.fullmatch(r" {4} *\^+", line)), None)
    return fault if caret is None else f"{fault}, at character {caret.index('^') - 3}"
