"""/v1/messages: one reply of a chat as Anthropic's message, whole or as events."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator
from contextlib import ExitStack, aclosing
from dataclasses import dataclass, field
from typing import Any

from outrider.outputs import CompletionOutput, RequestOutput
from outrider.progress import Request
from outrider.requests import Reader
from outrider.serve.answers import ids_of
from outrider.serve.chat import Chat, chat_of, conversation_of
from outrider.serve.errors import ApiError, aborted, api_error
from outrider.serve.messages.blocks import ContentBlocks, content_of
from outrider.serve.messages.protocol import CountBody, MessagesBody
from outrider.serve.messages.translation import budget_of, chat_body
from outrider.serve.sampling import can_bound, naming, rename_fields
from outrider.serve.state import Server
from outrider.serve.tool_calls import Parsed, ParseSchedule
from outrider.serve.tool_choice import ToolUse
from outrider.serve.usage import speculation_of
from outrider.serve.wire import event


async def message_job(server: Server, body: MessagesBody) -> Messages:
    """Check and tokenize a request.  Raises ApiError or RequestError."""
    ids = ids_of(body, "msg_")
    given = chat_body(body)
    if given.thinking_token_budget is None and can_bound(server.reasoning):
        given.thinking_token_budget = budget_of(body)
    try:
        chat = await chat_of(server, given, ids.own)
    except ApiError as error:
        rename_fields(error)
        raise
    return Messages(server, body, ids.shown, chat)


def count_of(server: Server, body: CountBody, reader: Reader) -> dict[str, Any]:
    """The answer of /v1/messages/count_tokens.  Raises ApiError or RequestError."""
    server.adapter_of(body.model)
    chat = chat_body(body)
    use = ToolUse.of(chat.tools, chat.tool_choice, chat.parallel_tool_calls)
    return {"input_tokens": len(reader.ids(conversation_of(server, chat, use)))}


@dataclass
class Messages:
    """One message.  chat: the same request as a chat, which reads the text."""

    server: Server
    body: MessagesBody
    id: str
    chat: Chat
    blocks: ContentBlocks = field(init=False)
    schedule: ParseSchedule = field(default_factory=ParseSchedule)

    def __post_init__(self) -> None:
        self.blocks = ContentBlocks(self.chat.request.id)

    @property
    def requests(self) -> list[Request]:
        return [self.chat.request]

    async def response(self) -> dict[str, Any]:
        """The whole message."""
        (output,) = await self.server.outputs(self.requests)
        (sample,) = output.outputs
        parsed = self._parsed(sample)
        usage = await self._usage(output)
        content = content_of(self.blocks.id, parsed)
        made = {**self._head(usage), "content": content, **end_of_turn(sample, parsed)}
        return {**made, **self._speculation(output)}

    async def events(self, room: ExitStack) -> AsyncGenerator[str]:
        """Its events.  An error after the first one is an event, too; one before it is raised."""
        began = False
        try:
            with naming(self.body):
                async with aclosing(self._events(room)) as parts:
                    async for part in parts:
                        yield part
                        began = True
        except Exception as error:
            if not began:
                raise
            yield event(api_error(error).message_body(), "error")

    async def _events(self, room: ExitStack) -> AsyncGenerator[str]:
        """Its events, those of one output together."""
        last: RequestOutput | None = None
        async with self.server.stream(self.requests, room) as outputs:
            async for _, output in outputs:
                begins, last = last is None, output
                made = list(self._start(output)) if begins else []
                made += self._grown(output.outputs[0])
                if made:
                    yield "".join(event(each, each["type"]) for each in made)
        assert last is not None, "the engine has yielded the last output"
        (sample,) = last.outputs
        end = end_of_turn(sample, self._parsed(sample))
        delta = {"type": "message_delta", "delta": end, "usage": await self._usage(last)}
        yield event({**delta, **self._speculation(last)}, "message_delta")
        yield event({"type": "message_stop"}, "message_stop")

    def _start(self, output: RequestOutput) -> Iterator[dict[str, Any]]:
        usage = {**_of_input(output), "output_tokens": 0}
        yield {"type": "message_start", "message": self._head(usage)}
        yield {"type": "ping"}

    def _grown(self, sample: CompletionOutput) -> Iterator[dict[str, Any]]:
        finished = sample.finish_reason is not None
        if not self.schedule.due(sample.text, finished):
            return iter(())
        parsed = self._parsed(sample)
        self.schedule.parsed(sample.text, parsed.calls)
        return self.blocks.grow(parsed, finished)

    def _parsed(self, sample: CompletionOutput) -> Parsed:
        return self.chat.reply.read(sample.text, sample.finish_reason)

    def _head(self, usage: dict[str, Any]) -> dict[str, Any]:
        return {
            "id": self.id,
            "type": "message",
            "role": "assistant",
            "model": self.server.name_of(self.body.model),
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": usage,
        }

    async def _usage(self, output: RequestOutput) -> dict[str, Any]:
        (sample,) = output.outputs
        thinking = await self.chat.reasoning_tokens(sample)
        counts = {"output_tokens": len(sample.token_ids)}
        return {**_of_input(output), **counts, "output_tokens_details": {"thinking_tokens": thinking}}

    def _speculation(self, output: RequestOutput) -> dict[str, Any]:
        return {"speculation": speculation_of([output])} if self.body.return_speculation else {}


def end_of_turn(sample: CompletionOutput, parsed: Parsed) -> dict[str, Any]:
    """The fields that say why a text has ended.  Raises ApiError for one that was aborted."""
    if sample.finish_reason == "abort":
        raise aborted()
    if sample.finish_reason == "length":
        return {"stop_reason": "max_tokens", "stop_sequence": None}
    if isinstance(sample.stop_reason, str):
        return {"stop_reason": "stop_sequence", "stop_sequence": sample.stop_reason}
    called = any(call.complete for call in parsed.calls)
    return {"stop_reason": "tool_use" if called else "end_turn", "stop_sequence": None}


def _of_input(output: RequestOutput) -> dict[str, int]:
    """Anthropic counts the tokens of a cached prefix apart from the other ones."""
    cached = output.num_cached_tokens or 0
    return {
        "input_tokens": len(output.prompt_token_ids) - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
    }
