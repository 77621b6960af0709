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

from outrider.core.structural_tag import Tag

FREE = "TEXT: /(.|\\n)*/"


def tagged(tags: Sequence[Tag], schemas: Sequence[Any], special: Mapping[str, int]) -> str:
    """The grammar in llguidance's JSON.

    schemas: of the tags, in its form.  special: ids of the special tokens that a text may have, by text.
    """
    triggers = list(dict.fromkeys(tag.trigger for tag in tags))
    others = [token for text, token in special.items() if text not in triggers]
    names = [*(["special"] if others else []), *(f"tag_{i}" for i in range(len(triggers)))]
    rules = [f"start: ({' | '.join(names)})* rest", "rest: TEXT", FREE]
    if others:
        rules.append(f"special: TEXT <[{','.join(map(str, others))}]>")
    for i, trigger in enumerate(triggers):
        bodies = [
            f"{_literals(tag.begin[len(trigger) :], special)} @json_{j} {_literals(tag.end, special)}"
            for j, tag in enumerate(tags)
            if tag.trigger == trigger
        ]
        token = f" | TEXT <[{special[trigger]}]>" if trigger in special else ""
        rules.append(f"trigger_{i}[lazy]: TEXT {json.dumps(trigger)}")
        rules.append(f"tag_{i}: (trigger_{i}{token}) ({' | '.join(bodies)})")
    parts = [{"name": f"json_{j}", "json_schema": schema} for j, schema in enumerate(schemas)]
    return json.dumps({"grammars": [{"lark_grammar": "\n".join(rules)}, *parts]})


def _literals(text: str, special: Mapping[str, int]) -> str:
    """A text in Lark, whose special tokens may be written as such."""
    if not text:
        return ""
    longest = sorted(map(re.escape, special), key=len, reverse=True)
    parts = re.split(f"({'|'.join(longest)})", text) if special else [text]
    written = (
        f"(<[{special[part]}]> | {json.dumps(part)})" if part in special else json.dumps(part)
        for part in parts
        if part
    )
    return " ".join(written)
