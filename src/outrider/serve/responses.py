"""/v1/responses: one response with items, whole or as events.  Nothing is stored between requests."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from contextlib import ExitStack, aclosing
from dataclasses import dataclass, field
from typing import Any

from pydantic import ValidationError

from outrider.errors import shortened
from outrider.outputs import CompletionOutput, RequestOutput
from outrider.progress import Request
from outrider.serve.answers import ids_of, now
from outrider.serve.chat import Reply, of_effort, reply_for
from outrider.serve.errors import ApiError, aborted, api_error
from outrider.serve.items import chat_tools, messages_of
from outrider.serve.logprobs import MessageLogprobs
from outrider.serve.output_items import OutputItems
from outrider.serve.protocol import JsonSchema, ResponseFormat, ResponsesBody
from outrider.serve.sampling import check_budget, check_logprobs, naming, of_format, params_of
from outrider.serve.state import Server
from outrider.serve.tool_calls import ParseSchedule
from outrider.serve.tool_choice import ToolUse
from outrider.serve.usage import speculation_of, usage_of
from outrider.serve.wire import event

LOGPROBS = "message.output_text.logprobs"


async def response_job(server: Server, body: ResponsesBody) -> Responses:
    """Check and tokenize a request.  Raises ApiError or RequestError."""
    adapter = server.adapter_of(body.model)
    if body.previous_response_id is not None:
        raise ApiError(
            400, "responses are not stored: send the whole conversation as input.", "previous_response_id"
        )
    if body.background:
        raise ApiError(400, "background responses are not supported: leave it out.", "background")
    check_logprobs(body, server.options.max_logprobs)
    check_budget(body, server.reasoning)
    with_logprobs = LOGPROBS in (body.include or ())
    if body.top_logprobs and not with_logprobs:
        raise ApiError(400, f'top_logprobs needs include=["{LOGPROBS}"].', "top_logprobs")
    use = ToolUse.of(chat_tools(body.tools), body.tool_choice, body.parallel_tool_calls)
    more: dict[str, Any] = {"max_tokens": body.max_output_tokens}
    if with_logprobs:
        more["logprobs"] = body.top_logprobs or 0
    if body.truncation == "auto" and body.truncate_prompt_tokens is None:
        more["truncate_prompt_tokens"] = -1  # as in vLLM
    if body.skip_special_tokens is None and (use.tools or server.has_special_markers):
        more["skip_special_tokens"] = False
    forms = [form for form in (_format(body), use.form) if form is not None]
    if len(forms) > 1:
        raise ApiError(400, "text.format and a forced tool_choice exclude each other.", "tool_choice")
    form, markers = forms[0] if forms else None, server.reasoning
    params = params_of(body, server.llm.sampling, form, markers, markers, bool(use.tools), **more)
    messages = messages_of(body.input, body.instructions)
    prompt = server.conversation(
        messages,
        tools=use.tools or None,
        chat_template_kwargs=of_effort(_effort(body)),
    )
    ids = ids_of(body, "resp_")
    (request,) = await server.read([prompt], params, ids.own, adapter, body.priority, body.cache_salt)
    reply = reply_for(server, use, body, request, messages, server.reasoning)
    made = Responses(server, body, ids.shown, now(), [request], reply)
    if with_logprobs:
        made.logprobs = MessageLogprobs(
            server.reader, body.top_logprobs or 0, request.params.skip_special_tokens
        )
    return made


def _effort(body: ResponsesBody) -> str | None:
    effort = (body.reasoning or {}).get("effort")
    if effort is not None and not isinstance(effort, str):
        raise ApiError(400, f"reasoning.effort must be a text, got {shortened(effort)}.", "reasoning.effort")
    return effort


def _format(body: ResponsesBody) -> dict[str, Any] | None:
    """structured_outputs of text.format, whose schema lies one level higher than in chat completions."""
    given = body.text.format if body.text is not None else None
    if given is None:
        return None
    rest = {key: value for key, value in given.items() if key != "type"}
    try:
        if given.get("type") == "json_schema":
            given = {"type": "json_schema", "json_schema": JsonSchema(**rest)}
        return of_format(ResponseFormat(**given))
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(["text.format", *map(str, first["loc"])])
        raise ApiError(400, f"{place}: {first['msg']}", place) from error


@dataclass
class Responses:
    """One response, and the numbers of the events sent so far."""

    server: Server
    body: ResponsesBody
    id: str
    created: int
    requests: Sequence[Request]  # one
    reply: Reply
    sequence: int = 0
    logprobs: MessageLogprobs | None = None  # if they are asked for
    items: OutputItems = field(init=False)
    schedule: ParseSchedule = field(default_factory=ParseSchedule)

    def __post_init__(self) -> None:
        self.items = OutputItems(self.requests[0].id)

    async def response(self) -> dict[str, Any]:
        """The whole response."""
        (output,) = await self.server.outputs(self.requests)
        sample = output.outputs[0]
        list(self._grown(sample))  # its events are for streams
        return await self._ended(output)

    async def events(self, room: ExitStack) -> AsyncGenerator[str]:
        """Its events.  An error after the first one is an event, too; one before it is raised."""
        try:
            with naming(self.body):
                async with aclosing(self._events(room)) as events:
                    async for each in events:
                        yield self._sent(each)
        except Exception as error:
            if self.sequence == 0:
                raise
            refusal = api_error(error).body()["error"]
            short = {"code": "server_error", "message": refusal["message"]}
            failed = {**self._head("failed"), "error": short}
            yield self._sent({**refusal, "type": "error"})
            yield self._sent({"type": "response.failed", "response": failed})

    def _sent(self, value: Mapping[str, Any]) -> str:
        numbered = {**value, "sequence_number": self.sequence}
        self.sequence += 1
        return event(numbered, value["type"])

    async def _events(self, room: ExitStack) -> AsyncGenerator[dict[str, Any]]:
        head = self._head("in_progress")
        async with self.server.stream(self.requests, room) as outputs:
            async for _, output in outputs:
                if self.sequence == 0:
                    yield {"type": "response.created", "response": head}
                    yield {"type": "response.in_progress", "response": head}
                for each in self._grown(output.outputs[0]):
                    yield each
        ended = await self._ended(output)
        yield {"type": f"response.{ended['status']}", "response": ended}

    def _grown(self, sample: CompletionOutput) -> Iterator[dict[str, Any]]:
        """Events for what is new in the text."""
        if not self.schedule.due(sample.text, sample.finish_reason is not None):
            return iter(())
        parsed = self.reply.read(sample.text, sample.finish_reason)
        self.schedule.parsed(sample.text, parsed.calls)
        logprobs = self.logprobs.of(sample, parsed) if self.logprobs is not None else ()
        return self.items.grow(parsed, status_of(sample), logprobs)

    async def _ended(self, output: RequestOutput) -> dict[str, Any]:
        """The response of a text that has ended, and whose items are complete."""
        made = self._head(status_of(output.outputs[0]) or "completed")
        made["output"] = self.items.items
        if made["status"] == "incomplete":
            made["incomplete_details"] = {"reason": "max_output_tokens"}
        (request,) = self.requests
        usage = usage_of([output], await self.reply.reasoning_tokens(self.server, request, output.outputs[0]))
        of_prompt = {**usage["prompt_tokens_details"], "cache_write_tokens": 0}  # which OpenAI charges for
        of_output = usage["completion_tokens_details"]
        made["usage"] = {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": of_prompt,
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": of_output,
            "total_tokens": usage["total_tokens"],
        }
        if self.body.return_speculation:
            made["speculation"] = speculation_of([output])
        return made

    def _head(self, status: str) -> dict[str, Any]:
        """Fields that are equal at the beginning and the end of a response."""
        body, params = self.body, self.requests[0].params
        return {
            "id": self.id,
            "object": "response",
            "created_at": self.created,
            "status": status,
            "error": None,
            "incomplete_details": None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata or {},
            "model": self.server.name_of(body.model),
            "output": [],
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": None,
            "store": False,
            "temperature": params.temperature,
            "text": {"format": (body.text.format if body.text else None) or {"type": "text"}},
            "tool_choice": body.tool_choice or "auto",
            "tools": body.tools or [],
            "top_logprobs": body.top_logprobs or 0,
            "top_p": params.top_p,
            "truncation": body.truncation or "disabled",
            "usage": None,
        }


def status_of(sample: CompletionOutput) -> str | None:
    """Status of the response; None before the text has ended.  Raises ApiError for one that was aborted."""
    if sample.finish_reason == "abort":
        raise aborted()
    if sample.finish_reason is None:
        return None
    return "incomplete" if sample.finish_reason == "length" else "completed"
