"""Content blocks of a message, and the events that build them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from pydantic_core import from_json

from outrider.serve.ids import derived
from outrider.serve.tool_calls import Parsed
from outrider.serve.wire import dumps, strict_json

Event = dict[str, Any]
# type of a block -> type of its deltas, and the field of their text
DELTAS = {
    "thinking": ("thinking_delta", "thinking"),
    "text": ("text_delta", "text"),
    "tool_use": ("input_json_delta", "partial_json"),
}


class Piece(NamedTuple):
    """What a block holds so far.

    text: of a call its arguments, a JSON text.  name: of a call.  complete: False for a call that was cut.
    id: of a call that has one of its own.
    """

    kind: str
    text: str
    name: str = ""
    complete: bool = True
    id: str = ""


def content_of(id: str, parsed: Parsed) -> list[dict[str, Any]]:
    """The blocks of a message that has ended.  id: from which those of its calls follow."""
    blocks = []
    for place, piece in enumerate(_pieces(parsed, True)):
        given = object_of(piece.text, piece.complete) if piece.kind == "tool_use" else {}
        blocks.append(_block(id, place, piece, given))
    return blocks


@dataclass
class ContentBlocks:
    """Thinking, text and calls of tools as they grow, one behind the other.

    Which blocks there are depends on the whole text only, not on when its parts came: text behind the first
    call is one block at the end.
    id: of the message, from which those of its calls follow.  pieces: of the blocks that have begun.
    """

    id: str
    pieces: list[Piece] = field(default_factory=list)

    def grow(self, parsed: Parsed, ended: bool) -> Iterator[Event]:
        """Yield the events for what is new in a text so far."""
        for place, piece in enumerate(_pieces(parsed, ended)):
            if place == len(self.pieces):
                if place:
                    yield from self._closed(place - 1)
                self.pieces.append(piece._replace(text=""))
                block = _block(self.id, place, self.pieces[place], {})
                yield {"type": "content_block_start", "index": place, "content_block": block}
            if new := piece.text[len(self.pieces[place].text) :]:
                self.pieces[place] = piece
                kind, name = DELTAS[piece.kind]
                yield {"type": "content_block_delta", "index": place, "delta": {"type": kind, name: new}}
        if ended and self.pieces:
            yield from self._closed(len(self.pieces) - 1)

    def _closed(self, place: int) -> Iterator[Event]:
        piece = self.pieces[place]
        if piece.kind == "thinking":
            delta = {"type": "signature_delta", "signature": _signature(self.id, piece.text)}
            yield {"type": "content_block_delta", "index": place, "delta": delta}
        yield {"type": "content_block_stop", "index": place}


def _block(id: str, place: int, piece: Piece, given: dict[str, Any]) -> dict[str, Any]:
    """A block of the message with this id.  given: the input of a call."""
    if piece.kind == "tool_use":
        own = piece.id or derived("toolu_", f"{id}/{place}")
        return {"type": piece.kind, "id": own, "name": piece.name, "input": given}
    if piece.kind == "thinking":
        return {"type": piece.kind, "thinking": piece.text, "signature": _signature(id, piece.text)}
    return {"type": piece.kind, "text": piece.text}


def _signature(id: str, text: str) -> str:
    """A mark of a block that is complete, which clients send back.  It is not checked."""
    return derived("", id) if text else ""


def _pieces(parsed: Parsed, ended: bool) -> list[Piece]:
    """What the blocks of a text hold, in their order."""
    lead = parsed.content[: parsed.lead] if parsed.calls else parsed.content
    made = [Piece("thinking", parsed.reasoning)] if parsed.reasoning else []
    made += [Piece("text", lead)] if lead else []
    made += [Piece("tool_use", call.arguments, call.name, call.complete, call.id) for call in parsed.calls]
    if ended and (rest := parsed.content[len(lead) :].lstrip()):
        made.append(Piece("text", rest))
    return made


def object_of(text: str, complete: bool) -> dict[str, Any]:
    """The object of a JSON text; of one that was cut off, what is there.

    Empty if the text has no object, or one that a response cannot have: with a number that is not finite.
    """
    try:
        value = strict_json(text) if complete else from_json(text, allow_partial="trailing-strings")
        dumps(value)  # a number of a cut text may be infinite, or longer than Python writes
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}
