"""Output items of /v1/responses, and the events that build them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from outrider.serve.ids import derived
from outrider.serve.tool_calls import Parsed, ToolCall

Event = dict[str, Any]
TEXTS = ("reasoning", "message")  # types of items with a text


@dataclass
class OutputItems:
    """Reasoning, a message and function calls as they grow.  An item keeps its place once it has begun.

    id: of the response, from which those of its items follow.  items: as in the response, a reasoning first.
    message, calls: places of the message and the function calls.
    """

    id: str
    items: list[dict[str, Any]] = field(default_factory=list)
    message: int | None = None
    calls: list[int] = field(default_factory=list)

    def grow(
        self, parsed: Parsed, status: str | None, logprobs: Sequence[dict[str, Any]] = ()
    ) -> Iterator[Event]:
        """Yield the events for what is new in a text so far.

        status: of the response, once the text has ended; None before.  logprobs: of the content.
        """
        if parsed.reasoning:
            yield from self._thought(parsed.reasoning)
            if (parsed.content or parsed.calls) and self.items[0]["status"] == "in_progress":
                yield from self._closed(0, "completed")
        for number, call in enumerate(parsed.calls[: parsed.calls_before]):
            yield from self._call(number, call)
        if parsed.content or (status and not (parsed.calls or self.items)):
            yield from self._text(parsed.content, logprobs)
        for number, call in enumerate(parsed.calls[parsed.calls_before :], parsed.calls_before):
            yield from self._call(number, call)
        if status is not None:
            for place, item in enumerate(self.items):
                if item["status"] == "in_progress":
                    ended = status if item["type"] in TEXTS else "incomplete"
                    yield from self._closed(place, ended)

    def _thought(self, reasoning: str) -> Iterator[Event]:
        """Events that bring the reasoning to this text."""
        if not self.items:
            item = {"type": "reasoning", "id": derived("rs_", self.id), "summary": [], "content": []}
            yield from self._opened(item)
            yield from self._part_added({"type": "reasoning_text", "text": ""})
        yield from self._text_added(0, reasoning)

    def _text(self, content: str, logprobs: Sequence[dict[str, Any]]) -> Iterator[Event]:
        """Events that bring the message to this content."""
        if self.message is None:
            self.message = len(self.items)
            item = {"type": "message", "id": derived("msg_", self.id), "role": "assistant", "content": []}
            yield from self._opened(item)
            yield from self._part_added(
                {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
            )
        yield from self._text_added(self.message, content, logprobs)

    def _part_added(self, part: dict[str, Any]) -> Iterator[Event]:
        """Begin the text of the last item."""
        self.items[-1]["content"] = [part]
        added = {"type": "response.content_part.added", "part": {**part}}
        yield {**self._place(len(self.items) - 1), **added}

    def _text_added(self, place: int, text: str, logprobs: Sequence[dict[str, Any]] = ()) -> Iterator[Event]:
        (part,) = self.items[place]["content"]
        new = text[len(part["text"]) :]
        if not new:
            return
        part["text"] += new
        event = {**self._place(place), "type": f"response.{part['type']}.delta", "delta": new}
        if "logprobs" in part:
            event["logprobs"] = [*logprobs[len(part["logprobs"]) :]]
            part["logprobs"] += event["logprobs"]
        yield event

    def _call(self, number: int, call: ToolCall) -> Iterator[Event]:
        """Events that bring a function call to these arguments."""
        if number == len(self.calls):
            self.calls.append(len(self.items))
            own = f"{self.id}/{number}"
            ids = {"id": derived("fc_", own), "call_id": call.id or derived("call_", own)}
            yield from self._opened({"type": "function_call", **ids, "name": call.name, "arguments": ""})
        place = self.calls[number]
        item = self.items[place]
        if new := call.arguments[len(item["arguments"]) :]:
            item["arguments"] += new
            yield {**self._place(place), "type": "response.function_call_arguments.delta", "delta": new}
        if call.complete and item["status"] == "in_progress":
            yield from self._closed(place, "completed")

    def _opened(self, item: dict[str, Any]) -> Iterator[Event]:
        self.items.append({**item, "status": "in_progress"})
        added = {"output_index": len(self.items) - 1, "item": {**self.items[-1]}}
        yield {"type": "response.output_item.added", **added}

    def _closed(self, place: int, status: str) -> Iterator[Event]:
        """The last events of an item."""
        item = self.items[place]
        item["status"] = status
        where = self._place(place)
        if item["type"] in TEXTS:
            (part,) = item["content"]
            done = {name: part[name] for name in ("text", "logprobs") if name in part}
            yield {**where, "type": f"response.{part['type']}.done", **done}
            yield {**where, "type": "response.content_part.done", "part": part}
        else:
            kind = "response.function_call_arguments.done"
            yield {**where, "type": kind, "name": item["name"], "arguments": item["arguments"]}
        yield {"type": "response.output_item.done", "output_index": place, "item": item}

    def _place(self, place: int) -> dict[str, Any]:
        item = self.items[place]
        where = {"item_id": item["id"], "output_index": place}
        return {**where, "content_index": 0} if item["type"] in TEXTS else where
