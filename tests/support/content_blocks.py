"""Content blocks that a client of /v1/messages builds from the events of a stream."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any


def joined_blocks(events: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """The blocks of events, of which each must belong to the block that is open.

    The input of a call is a JSON text: its arguments may be incomplete.
    """
    blocks = list[dict[str, Any]]()
    open_: int | None = None
    for event in events:
        kind = event["type"]
        if kind == "content_block_start":
            assert open_ is None and event["index"] == len(blocks), event
            open_ = event["index"]
            blocks.append({**event["content_block"]})
            if "input" in blocks[-1]:
                blocks[-1]["input"] = ""
            continue
        assert event["index"] == open_, event
        if kind == "content_block_stop":
            open_ = None
            continue
        for name, new in event["delta"].items():
            if name != "type":
                blocks[-1]["input" if name == "partial_json" else name] += new
    assert open_ is None
    return blocks


def with_inputs_parsed(blocks: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """The blocks of a stream with the inputs of calls as objects, as in a whole message."""
    return [
        {**block, "input": json.loads(block["input"] or "{}")} if "input" in block else block
        for block in blocks
    ]
