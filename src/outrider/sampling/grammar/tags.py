"""The grammar of a text with structural tags.

    start: (special | tag_0 | tag_1)* TEXT      free text with tags in it
    trigger_0[lazy]: TEXT "<function="          ends with the first trigger, behind which nothing else
    tag_0: trigger_0 "add>" @json_0 "</function>"       than its tags can follow

A marker that is a special token may be written as that token, or as text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from outrider.core.reasoning import ReasoningMarkers
from outrider.core.structural_tag import Tag

FREE = "TEXT: /(.|\\n)*/"
SPACE = "SPACE: /[ \\n]{0,4}/"  # between reasoning and answer; small models write more without end


def tagged(tags: Sequence[Tag], schemas: Sequence[Any], special: Mapping[str, int]) -> str:
    """The grammar in llguidance's JSON.

    schemas: of the tags, in its form.  special: ids of the special tokens that a text may have, by text.
    """
    bodies: dict[str, list[str]] = {}  # by trigger: what follows it in each of its tags
    for i, tag in enumerate(tags):
        rest = _literals(tag.begin[len(tag.trigger) :], special)
        bodies.setdefault(tag.trigger, []).append(f"{rest} @json_{i} {_literals(tag.end, special)}")
    names, rules = list[str](), ["rest: TEXT", FREE]
    if others := [str(token) for text, token in special.items() if text not in bodies]:
        names.append("special")
        rules.append(f"special: TEXT <[{','.join(others)}]>")
    for i, (trigger, alternatives) in enumerate(bodies.items()):
        names.append(f"tag_{i}")
        token = f" | TEXT <[{special[trigger]}]>" if trigger in special else ""
        rules.append(f"trigger_{i}[lazy]: TEXT {json.dumps(trigger)}")
        rules.append(f"tag_{i}: (trigger_{i}{token}) ({' | '.join(alternatives)})")
    rules.insert(0, f"start: ({' | '.join(names)})* rest")
    parts = [{"name": f"json_{i}", "json_schema": schema} for i, schema in enumerate(schemas)]
    return json.dumps({"grammars": [{"lark_grammar": "\n".join(rules)}, *parts]})


def thought_first(markers: ReasoningMarkers, answer: str, special: Mapping[str, int]) -> str:
    """The grammar of an answer, in llguidance's JSON, after a reasoning.

    start: ("<think>" thought SPACE)? @answer       or, where it has begun already, thought SPACE @answer
    thought[lazy]: TEXT "</think>"                  ends with the first marker

    special: as in `tagged`.
    """
    first, *parts = json.loads(answer)["grammars"]
    others = [str(token) for text, token in special.items() if text != markers.end]
    free = f"(TEXT <[{','.join(others)}]>)*" if others else ""
    token = f" | TEXT <[{special[markers.end]}]>" if markers.end in special else ""
    thought = f"{_literals(markers.begin, special)} thought SPACE"
    first_part = f"({thought})?" if markers.begin else thought
    rules = [
        f"start: {first_part} @answer",
        f"thought: {free} (until{token})",
        f"until[lazy]: TEXT {json.dumps(markers.end)}",
        FREE,
        SPACE,
    ]
    return json.dumps({"grammars": [{"lark_grammar": "\n".join(rules)}, {**first, "name": "answer"}, *parts]})


def _literals(text: str, special: Mapping[str, int]) -> str:
    """A text in Lark, whose special tokens may be written as such."""
    if not text:
        return ""
    longest_first = sorted(map(re.escape, special), key=len, reverse=True)
    parts = re.split(f"({'|'.join(longest_first)})", text) if special else [text]
    written = list[str]()
    for part in filter(None, parts):
        literal = json.dumps(part)
        written.append(f"(<[{special[part]}]> | {literal})" if part in special else literal)
    return " ".join(written)
