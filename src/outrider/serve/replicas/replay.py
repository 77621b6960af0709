"""The rest of a stream that another replica repeats, after what the client has received.

A request that is repeated with its seed gives the same text.  Ends of events may differ, times and
statistics do.  So what has been sent is counted in characters and entries, and that many are left out:

    sent    "The fut" "ure of"          13 characters
    again   "The" " future" " of AI"    " AI" is left
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from outrider.serve.errors import ApiError
from outrider.serve.wire import DONE, event

TEXTS = ("text", "content", "reasoning", "reasoning_content")  # fields of a choice that grow
# type of the deltas of a message's block -> the field that grows
BLOCK_TEXTS = {"text_delta": "text", "thinking_delta": "thinking", "input_json_delta": "partial_json"}


class Part(NamedTuple):
    """A field of an event.  key: of the sequence (a text or list) that it continues, or of a single value."""

    key: tuple[Any, ...]
    place: dict[str, Any]
    field: str
    single: bool = False

    @property
    def length(self) -> int:
        value = self.place.get(self.field)
        return 0 if value is None else 1 if self.single else len(value)

    def cut(self, length: int) -> None:
        """Leave out the first characters or entries."""
        if self.single:
            self.place[self.field] = None
        else:
            self.place[self.field] = self.place[self.field][length:]


class Replay:
    """Filter of the events of a repeated stream.  sent: the events that the client has."""

    def __init__(self, sent: Sequence[str]) -> None:
        self.sent = [parsed(text) for text in sent if text != DONE]
        self._left = Counter[tuple[Any, ...]]()  # of each sequence: sent, and not yet left out
        for value in self.sent:
            self._left.update({part.key: part.length for part in _parts(value)})
        self._number = len(self.sent)  # of the next event of a response

    def rest(self, text: str) -> str | None:
        """An event without what has been sent; None if nothing is left."""
        if not self.sent or text == DONE:
            return text
        value = parsed(text)
        parts = list(_parts(value))
        before = sum(part.length for part in parts)
        for part in parts:
            if cut := min(part.length, self._left[part.key]):
                self._left[part.key] -= cut
                part.cut(cut)
        after = sum(part.length for part in parts)
        if before and not after:
            return None
        if after < before:
            _tidy(value)
        place, field = _time_of(value)
        if field in place:
            first, _ = _time_of(self.sent[0])
            place[field] = first[field]
        if "sequence_number" not in value:
            return event(value, value.get("type"))
        value["sequence_number"] = self._number
        self._number += 1
        return event(value, value["type"])

    def failure(self, refusal: ApiError) -> list[str]:
        """The last events of a stream that ends with an error."""
        if self.sent and self.sent[0].get("type") == "message_start":
            return [event(refusal.message_body(), "error")]
        error = refusal.body()["error"]
        if not (self.sent and "sequence_number" in self.sent[0]):
            return [event({"error": error}), DONE]
        last = {**error, "type": "error", "sequence_number": self._number}
        short = {"code": "server_error", "message": error["message"]}
        response = {**self.sent[0]["response"], "status": "failed", "error": short}
        failed = {"type": "response.failed", "response": response, "sequence_number": self._number + 1}
        return [event(last, "error"), event(failed, "response.failed")]


def parsed(text: str) -> dict[str, Any]:
    """The JSON of an event."""
    value: dict[str, Any] = json.loads(text.partition("data: ")[2])
    return value


def _parts(value: dict[str, Any]) -> Iterator[Part]:
    kind = value.get("type")
    if kind == "content_block_delta":
        delta = value["delta"]
        field = BLOCK_TEXTS.get(delta["type"])
        yield Part((kind, value["index"], delta["type"]), delta, field or "type", field is None)
        return
    if kind is not None:  # of a response or a message
        whole, place = not kind.endswith(".delta"), value.get("output_index", value.get("index"))
        yield Part((kind, place), value, "type" if whole else "delta", whole)
        if not whole and "logprobs" in value:
            yield Part((kind, "logprobs", value["output_index"]), value, "logprobs")
        return
    for choice in value["choices"]:
        yield from _choice_parts(choice["index"], choice)
        yield Part((choice["index"], "prompt of chat"), value, "prompt_token_ids", True)
    for field in ("usage", "speculation") if not value["choices"] else ():
        yield Part((field,), value, field, True)


def _choice_parts(index: int, choice: dict[str, Any]) -> Iterator[Part]:
    delta = choice.get("delta", choice)
    for field in TEXTS:
        if field in delta:
            yield Part((index, field), delta, field)
    yield Part((index, "role"), delta, "role", True)
    for call in delta.get("tool_calls", ()):
        yield Part((index, "call", call["index"]), call, "id", True)
        yield Part((index, "arguments", call["index"]), call["function"], "arguments")
    for field, entries in (choice.get("logprobs") or {}).items():
        if isinstance(entries, list):
            yield Part((index, "logprobs", field), choice["logprobs"], field)
    yield Part((index, "prompt"), choice, "prompt_token_ids", True)
    if "token_ids" in choice:
        yield Part((index, "ids"), choice, "token_ids")
    if "outrider" in choice:
        yield Part((index, "origins"), choice["outrider"], "tokens")
    yield Part((index, "end"), choice, "finish_reason", True)


def _tidy(value: dict[str, Any]) -> None:
    """Leave out the fields of which nothing is left, as an event has them that continues."""
    if value.get("prompt_token_ids", ()) is None:
        del value["prompt_token_ids"]
    for choice in value.get("choices", ()):
        delta = choice.get("delta", {})
        if delta.get("role", "") is None:
            del delta["role"]
        for field in TEXTS:
            if field in delta and not delta[field]:
                del delta[field]
        calls = delta.get("tool_calls", [])
        for call in calls:
            if call.get("id", "") is None:
                for field in ("id", "type"):
                    del call[field]
                del call["function"]["name"]
        if left := [call for call in calls if "id" in call or call["function"]["arguments"]]:
            delta["tool_calls"] = left
        elif calls:
            del delta["tool_calls"]


def _time_of(value: dict[str, Any]) -> tuple[dict[str, Any], str]:
    """The dict and the field with the time at which the answer began."""
    return (value.get("response", {}), "created_at") if "type" in value else (value, "created")
