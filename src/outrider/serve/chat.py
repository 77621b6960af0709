"""/v1/chat/completions: replies to a conversation, with tool calls."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from uuid import uuid4

from outrider.core.params import SamplingParams
from outrider.core.reasoning import ReasoningMarkers, Thought
from outrider.engine.detokenizer import Detokenizer
from outrider.outputs import CompletionOutput
from outrider.progress import Request
from outrider.serve.answers import Job, ids_of
from outrider.serve.errors import ApiError
from outrider.serve.harmony import CLOSINGS, HARMONY, HarmonyMarkers
from outrider.serve.logprobs import of_token
from outrider.serve.protocol import Calling, ChatBody
from outrider.serve.sampling import check_budget, check_logprobs, params_of
from outrider.serve.state import Server
from outrider.serve.tool_calls import Parsed, ParseSchedule, ToolCall, ToolParser, listed
from outrider.serve.tool_choice import ToolUse
from outrider.serve.tools import PARSERS


async def chat_job(server: Server, body: ChatBody) -> Job:
    """Check and tokenize a request.  Raises ApiError or RequestError."""
    ids = ids_of(body, "chatcmpl-")
    chat = await chat_of(server, body, ids.own)
    return Job(server, body, ids.shown, "chat.completion", "chat.completion.chunk", [chat.request], chat)


async def chat_of(server: Server, body: ChatBody, id: str) -> Chat:
    """Check and tokenize a request of this id.  Raises ApiError or RequestError."""
    adapter = server.adapter_of(body.model)
    check_logprobs(body, server.options.max_logprobs)
    check_budget(body, server.reasoning)
    use = ToolUse.of(body.tools, body.tool_choice, body.parallel_tool_calls)
    if body.top_logprobs and not body.logprobs:
        raise ApiError(400, "top_logprobs needs logprobs=true.", "top_logprobs")
    if body.chat_template is not None and not server.options.trust_request_chat_template:
        raise ApiError(
            400, "chat_template needs a server with --trust-request-chat-template.", "chat_template"
        )
    more: dict[str, Any] = {"max_tokens": body.max_completion_tokens or body.max_tokens}
    if body.logprobs:
        more["logprobs"] = body.top_logprobs or 0
    if body.skip_special_tokens is None and (use.tools or server.has_special_markers):
        more["skip_special_tokens"] = False
    markers = server.reasoning
    if markers is not None and body.continue_final_message:
        markers = markers.within(str(body.messages[-1].get("content")))
    params = params_of(body, server.llm.sampling, use.form, markers, markers, bool(use.tools), **more)
    prompt = conversation_of(server, body, use)
    (request,) = await server.read([prompt], params, id, adapter, body.priority, body.cache_salt)
    return Chat(server, body, request, reply_for(server, use, body, request, body.messages, markers))


def conversation_of(server: Server, body: ChatBody, use: ToolUse) -> dict[str, Any]:
    """The prompt of a request, and what its template is given."""
    return server.conversation(
        body.messages,
        chat_template=body.chat_template,
        tools=use.tools or None,
        documents=body.documents,
        add_generation_prompt=body.add_generation_prompt,
        continue_final_message=body.continue_final_message,
        chat_template_kwargs={**of_effort(body.reasoning_effort), **(body.chat_template_kwargs or {})},
    )


def of_effort(effort: str | None) -> dict[str, Any]:
    """Variables of the chat template for a reasoning effort, as in vLLM; "none" turns reasoning off."""
    return {} if effort is None else {"reasoning_effort": effort, "enable_thinking": effort != "none"}


@dataclass
class Reply:
    """Reader of reasoning and tool calls in the text of a reply.

    parser: None: the text has no calls.  use: the tools of the request.  markers: of a reasoning behind the
    prompt; None if there is none, or it stays in the text.  id: of the request, for ids of calls.
    calls_before: calls in the conversation so far.
    """

    parser: ToolParser | None
    use: ToolUse = field(default_factory=ToolUse)
    ending: frozenset[str] = frozenset()  # special tokens at the end of a text, which are not part of it
    markers: ReasoningMarkers | None = None
    id: str = ""
    calls_before: int = 0

    def read(self, text: str, finish_reason: str | None) -> Parsed:
        """Content and calls of a text so far.

        The same for a text that came in parts and for a whole one: a call that has begun stays a call.
        """
        text = self._unended(text)
        thought = self.markers.split(text, finish_reason is not None) if self.markers else Thought("", text)
        if thought.answer is None:
            return Parsed("", [], reasoning=thought.reasoning, start=thought.start)
        parsed = self._parsed(thought.answer, finish_reason)
        if self.use.limited:
            parsed = parsed.only(self.use.names)
        calls = parsed.calls[:1] if self.use.single else parsed.calls
        calls = [self._with_id(call, number) for number, call in enumerate(calls)]
        return parsed._replace(calls=calls, reasoning=thought.reasoning, start=thought.start)

    def _with_id(self, call: ToolCall, number: int) -> ToolCall:
        """A call with the id that the chat template demands, if it demands one."""
        if call.id or self.parser is None or self.parser.new_id is None:
            return call
        own = f"{self.id}/{number}"
        return call._replace(id=self.parser.new_id(call.name, self.calls_before + number, own))

    async def reasoning_tokens(self, server: Server, request: Request, sample: CompletionOutput) -> int:
        """Number of the tokens of the reasoning."""
        if self.markers is None:
            return 0
        end = self.markers.reasoning_end(self._unended(sample.text), sample.finish_reason is not None)
        return await asyncio.to_thread(tokens_before, end, server, request, sample) if end else 0

    def _unended(self, text: str) -> str:
        for token in self.ending:
            text = text.removesuffix(token)
        return text

    def _parsed(self, text: str, finish_reason: str | None) -> Parsed:
        if self.parser is None:
            return Parsed(text, [])
        if (name := self.use.name) is not None:
            return Parsed("", [ToolCall(name, text, finish_reason not in (None, "length"))])
        if self.use.required:
            return Parsed("", [each for each in listed(text) if isinstance(each, ToolCall)])
        return self.parser.parse(text, finish_reason is not None, self.use.parameters)


def tokens_before(start: int, server: Server, request: Request, sample: CompletionOutput) -> int:
    """Number of the tokens in front of a place in the text."""
    text = Detokenizer(server.tokenizer, request.params.skip_special_tokens)
    for token in sample.token_ids:
        text.feed(token)
    return sum(end <= start for end in text.ends)


def called(call: ToolCall) -> dict[str, Any]:
    """A call in OpenAI's shape, with its id or a new one."""
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": call.id or f"call_{uuid4().hex[:24]}", "type": "function", "function": function}


def reply_for(
    server: Server,
    use: ToolUse,
    body: Calling,
    request: Request,
    messages: Sequence[Mapping[str, Any]],
    markers: ReasoningMarkers | None,
) -> Reply:
    """A reader of the replies to a request.  messages: of the conversation.  markers: of their reasoning."""
    parser = server.tool_parser if use.tools else None
    separate = body.separate_reasoning is not False
    if markers is not None and not calls_may_come(use, request.params):
        markers = markers._replace(calls=())
    markers = markers_of(parser, markers, request.prompt or "") if separate else None
    if not (use.tools or markers):
        return Reply(None)
    special = server.tokenizer.convert_ids_to_tokens(sorted(server.llm.engine.ending))
    own = CLOSINGS if isinstance(markers, HarmonyMarkers) else ()  # which say that a message is complete
    ending = frozenset(token for token in special if token and token not in own)
    given = [message.get("tool_calls") for message in messages]
    before = sum(len(calls) for calls in given if isinstance(calls, list))
    return Reply(parser, use, ending, markers, request.id, before)


def calls_may_come(use: ToolUse, params: SamplingParams) -> bool:
    """Whether a marker of a call ends the reasoning: not in front of a form, which has its own beginning."""
    return bool(use.tools) and params.structured_outputs is None


def markers_of(
    parser: ToolParser | None, markers: ReasoningMarkers | None, prompt: str
) -> ReasoningMarkers | None:
    """The markers of a reasoning behind a prompt.  Calls in messages of gpt-oss are read with its own."""
    if markers is None and parser is PARSERS["openai"]:
        markers = HARMONY
    return None if markers is None else markers.behind(prompt)


@dataclass
class Sent:
    """Progress of one choice, as sent: characters of content, of reasoning and of each call's arguments,
    tokens with log-probabilities.
    """

    characters: int = 0
    reasoning: int = 0
    tokens: int = 0
    calls: list[int] = field(default_factory=list)
    schedule: ParseSchedule = field(default_factory=ParseSchedule)

    def new_calls(self, calls: Sequence[ToolCall]) -> list[dict[str, Any]]:
        """The new parts of calls: of a new one its name, then of each what was added to its arguments."""
        made: list[dict[str, Any]] = []
        for index, call in enumerate(calls):
            begins = index == len(self.calls)
            if begins:
                self.calls.append(0)
            if new := call.arguments[self.calls[index] :]:
                self.calls[index] += len(new)
            if begins:
                made.append({"index": index, **called(call._replace(arguments=new))})
            elif new:
                made.append({"index": index, "function": {"arguments": new}})
        return made


@dataclass
class Chat:
    """`Choices` of replies."""

    server: Server
    body: ChatBody
    request: Request
    reply: Reply
    sent: dict[int, Sent] = field(default_factory=dict)

    def choice(self, i: int, sample: CompletionOutput) -> dict[str, Any]:
        parsed = self.reply.read(sample.text, sample.finish_reason or "stop")
        message: dict[str, Any] = {"role": "assistant", "content": parsed.content, "refusal": None}
        message |= self._reasoning(parsed.reasoning)
        if parsed.calls or parsed.reasoning:
            message["content"] = parsed.content or None
        if parsed.calls:
            message["tool_calls"] = [called(call) for call in parsed.calls]
        return {
            "message": message,
            "logprobs": self._logprobs(sample, self._shown_from(sample, parsed)),
            "finish_reason": self._reason(sample, parsed.calls),
            "stop_reason": sample.stop_reason,
        }

    def first(self, i: int, sample: CompletionOutput) -> list[dict[str, Any]]:
        delta = {"role": "assistant", "content": ""}
        return [{"delta": delta, "logprobs": None, "finish_reason": None}]

    def delta(self, i: int, sample: CompletionOutput) -> list[dict[str, Any]]:
        sent = self.sent.setdefault(sample.index, Sent())
        if not sent.schedule.due(sample.text, sample.finish_reason is not None):
            return []
        parsed = self.reply.read(sample.text, sample.finish_reason)
        sent.schedule.parsed(sample.text, parsed.calls)
        content = parsed.content[sent.characters :]
        made = self._reasoning(parsed.reasoning[sent.reasoning :])
        if content:
            made["content"] = content
        if calls := sent.new_calls(parsed.calls):
            made["tool_calls"] = calls
        if not (made or sample.finish_reason):
            return []
        logprobs = self._logprobs(sample, sent.tokens or self._shown_from(sample, parsed))
        sent.characters, sent.reasoning = sent.characters + len(content), len(parsed.reasoning)
        sent.tokens = len(sample.token_ids)
        reason = self._reason(sample, parsed.calls)
        part = {"delta": made, "logprobs": logprobs, "finish_reason": reason}
        return [{**part, "stop_reason": sample.stop_reason} if reason else part]

    async def reasoning_tokens(self, sample: CompletionOutput) -> int:
        return await self.reply.reasoning_tokens(self.server, self.request, sample)

    def _reasoning(self, text: str) -> dict[str, Any]:
        """Fields of a message, under the names that vLLM and DeepSeek give them."""
        shown = text and self.body.include_reasoning is not False
        return {"reasoning": text, "reasoning_content": text} if shown else {}

    def _reason(self, sample: CompletionOutput, calls: Sequence[ToolCall]) -> str | None:
        forced = self.reply.use.name is not None  # OpenAI's servers return "stop" then
        ended = sample.finish_reason == "stop" and any(call.complete for call in calls)
        return "tool_calls" if ended and not forced else sample.finish_reason

    def _shown_from(self, sample: CompletionOutput, parsed: Parsed) -> int:
        """Index of the first token whose log-probabilities are returned: that behind a hidden reasoning."""
        if self.body.include_reasoning is not False or sample.logprobs is None or not parsed.start:
            return 0
        return tokens_before(parsed.start, self.server, self.request, sample)

    def _logprobs(self, sample: CompletionOutput, start: int) -> dict[str, Any] | None:
        if sample.logprobs is None:
            return None
        reader, body = self.server.reader, self.body
        content = [
            of_token(reader, token, entry, body.top_logprobs or 0, body.return_tokens_as_token_ids)
            for token, entry in zip(sample.token_ids[start:], sample.logprobs[start:])
        ]
        return {"content": content, "refusal": None}
