"""Structural tags: marked parts of a free text that follow JSON schemas, with vLLM's names."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from outrider.errors import RequestError, shortened

WHERE = "structured_outputs.structural_tag"
MOST_TAGS = 1000  # which take half a second to compile
SHAPE = (
    'must be {"structures": [{"begin": text, "schema": JSON schema, "end": text}, …], "triggers": [text, …]}'
)
FORMAT = (
    'format must be {"type": "triggered_tags", "triggers": …, "tags": …}, whose contents are JSON schemas'
)


class Tag(NamedTuple):
    """A marked part of a text: `begin`, a JSON value of `schema`, and `end`.

    trigger: beginning of `begin`.  Once it is in the text, so must be the rest.
    """

    trigger: str
    begin: str
    schema: Mapping[str, Any]
    end: str


def tags_of(given: Any) -> tuple[Tag, ...]:
    """The tags of a structural tag, as a dict or its text.  Raises RequestError naming the fault."""
    try:
        value = json.loads(given) if isinstance(given, str) else given
        json.dumps(value)
    except (TypeError, ValueError, RecursionError) as error:
        raise _refused(f"is no JSON: {error}") from error
    if isinstance(value, Mapping) and "format" in value:
        value = _of_format(value["format"])
    if not isinstance(value, Mapping):
        raise _refused(f"{SHAPE}, got {shortened(value)}")
    structures: Any = value.get("structures")
    triggers: Any = value.get("triggers")
    if not _filled(structures) or not _filled(triggers):
        raise _refused(f"{SHAPE}, got {shortened(value)}")
    if len(structures) > MOST_TAGS:
        raise _refused(f"may have {MOST_TAGS} structures at most, got {len(structures)}")
    if not all(isinstance(trigger, str) and trigger for trigger in triggers):
        raise _refused(f"triggers must be texts that are not empty, got {shortened(triggers)}")
    return tuple(_tag(structure, i, triggers) for i, structure in enumerate(structures))


def _tag(given: Any, i: int, triggers: Sequence[str]) -> Tag:
    given = given if isinstance(given, Mapping) else {}
    begin, schema, end = (given.get(name) for name in ("begin", "schema", "end"))
    if not (isinstance(begin, str) and isinstance(schema, Mapping) and isinstance(end, str)):
        raise _refused(f"{SHAPE}, got {shortened(given)} as structure {i}")
    found = [trigger for trigger in triggers if begin.startswith(trigger)]
    if not found:
        raise _refused(f"the beginning {shortened(begin)} of structure {i} starts with none of the triggers")
    return Tag(min(found, key=len), begin, schema, end)


def _of_format(given: Any) -> Any:
    """The structures and triggers of xgrammar's triggered_tags."""
    if not isinstance(given, Mapping) or given.get("type") != "triggered_tags":
        raise _refused(f"{FORMAT}, got {shortened(given)}")
    for name in ("at_least_one", "stop_after_first"):
        if given.get(name):
            raise _refused(f"{name} is not supported: leave it out")
    structures = []
    for tag in given["tags"] if _filled(given.get("tags")) else ():
        content = tag.get("content") if isinstance(tag, Mapping) else None
        if not isinstance(content, Mapping) or content.get("type") != "json_schema":
            raise _refused(f"{FORMAT}, got {shortened(tag)}")
        structures.append({**tag, "schema": content.get("json_schema")})
    return {"structures": structures, "triggers": given.get("triggers")}


def _filled(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str) and len(value) > 0


def _refused(fault: str) -> RequestError:
    return RequestError(f"{WHERE} {fault}.", WHERE)
