"""Content blocks of a message, and the events that build them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from pydantic_core import from_json

from outrider.serve.answers import derived
from outrider.serve.tool_calls import Parsed

Event = dict[str, Any]
# type of a block -> type of its deltas, and the field of their text
DELTAS = {
    "thinking": ("thinking_delta", "thinking"),
    "text": ("text_delta", "text"),
    "tool_use": ("input_json_delta", "partial_json"),
}


class Piece(NamedTuple):
    """What a block holds so far.  text: of a call its arguments, a JSON text.  name: of a call."""

    kind: str
    text: str
    name: str = ""


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
                yield {"type": "content_block_start", "index": place, "content_block": self._block(place, {})}
            if new := piece.text[len(self.pieces[place].text) :]:
                self.pieces[place] = piece
                kind, name = DELTAS[piece.kind]
                yield {"type": "content_block_delta", "index": place, "delta": {"type": kind, name: new}}
        if ended and self.pieces:
            yield from self._closed(len(self.pieces) - 1)

    def content(self) -> list[dict[str, Any]]:
        """The blocks of a message that has ended."""
        return [self._block(place, object_of(piece.text)) for place, piece in enumerate(self.pieces)]

    def _block(self, place: int, given: dict[str, Any]) -> dict[str, Any]:
        """A block.  given: the input of a call."""
        kind, text, name = self.pieces[place]
        if kind == "tool_use":
            id = derived("toolu_", f"{self.id}/{place}")
            return {"type": kind, "id": id, "name": name, "input": given}
        if kind == "thinking":
            return {"type": kind, "thinking": text, "signature": self._signature(text)}
        return {"type": kind, "text": text}

    def _closed(self, place: int) -> Iterator[Event]:
        kind, text, _ = self.pieces[place]
        if kind == "thinking":
            delta = {"type": "signature_delta", "signature": self._signature(text)}
            yield {"type": "content_block_delta", "index": place, "delta": delta}
        yield {"type": "content_block_stop", "index": place}

    def _signature(self, text: str) -> str:
        """A mark of a block that is complete, which clients send back.  It is not checked."""
        return derived("", self.id) if text else ""


def _pieces(parsed: Parsed, ended: bool) -> list[Piece]:
    """What the blocks of a text hold, in their order."""
    lead = parsed.content[: parsed.lead] if parsed.calls else parsed.content
    made = [Piece("thinking", parsed.reasoning)] if parsed.reasoning else []
    made += [Piece("text", lead)] if lead else []
    made += [Piece("tool_use", call.arguments, call.name) for call in parsed.calls]
    if ended and (rest := parsed.content[len(lead) :].lstrip()):
        made.append(Piece("text", rest))
    return made


def object_of(text: str) -> dict[str, Any]:
    """The object of a JSON text; of one that was cut off, what is there."""
    try:
        value = from_json(text, allow_partial="trailing-strings", allow_inf_nan=False)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}
