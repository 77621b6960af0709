"""Common part of /v1/completions and /v1/chat/completions: one request from body to response or stream."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from outrider.core.logprobs import Entry
from outrider.errors import shortened
from outrider.outputs import CompletionOutput, RequestOutput
from outrider.progress import Request
from outrider.serve.errors import ApiError, api_error
from outrider.serve.ids import ATTEMPT, id_of
from outrider.serve.logprobs import prompt_logprobs
from outrider.serve.protocol import ChatBody, Classic, Sampling, StreamOptions
from outrider.serve.sampling import naming
from outrider.serve.state import Server
from outrider.serve.traces import HEADERS
from outrider.serve.usage import origins_of, speculation_of, usage_of, usage_so_far
from outrider.serve.wire import DONE, dumps, event


def now() -> int:
    return int(time.time())


class Choices(Protocol):
    """Choices of one response, and how much of each has been sent.  i: index of the prompt."""

    def choice(self, i: int, sample: CompletionOutput) -> dict[str, Any]:
        """A whole choice."""

    def first(self, i: int, sample: CompletionOutput) -> list[dict[str, Any]]:
        """Parts of a stream before the first token."""

    def delta(self, i: int, sample: CompletionOutput) -> list[dict[str, Any]]:
        """Parts with what is new in a sample since the last call."""

    async def reasoning_tokens(self, sample: CompletionOutput) -> int:
        """Number of the tokens in front of the answer."""


@dataclass
class SoFar:
    """What has been sent of a stream.

    opened: beginning of most events; the rest is what changes.  counts: the field of those without usage, if
    usage is asked for.  started: choice -> tokens whose ids and origins have been sent.
    complete: choices; the other ones of a request may go on.  ended: outputs, in the order of their ends.
    """

    opened: str
    counts: dict[str, Any]
    started: dict[int, int] = field(default_factory=dict)
    complete: set[int] = field(default_factory=set)
    ended: list[RequestOutput] = field(default_factory=list)


@dataclass(frozen=True)
class Job:
    """A request that has been checked and tokenized.

    kind: of a response.  chunk_kind: of a part of a stream.
    """

    server: Server
    body: Classic
    id: str
    kind: str
    chunk_kind: str
    requests: Sequence[Request]
    choices: Choices
    created: int = field(default_factory=now)

    def head(self, kind: str) -> dict[str, Any]:
        model = self.server.name_of(self.body.model)
        return {"id": self.id, "object": kind, "created": self.created, "model": model}

    async def response(self) -> dict[str, Any]:
        """The response, with a choice for each sample of each prompt."""
        outputs = await self.server.outputs(self.requests)
        if self.body.max_tokens == 0:
            outputs = [*map(without_text, outputs)]
        made = self.head(self.kind)
        n = self.body.n
        made["choices"] = [
            {
                "index": i * n + index,
                **self.choices.choice(i, sample),
                **self._prompt_ids(i, chat=False),
                **self._token_ids(sample, 0),
                **self._origins(sample, 0),
            }
            for i, output in enumerate(outputs)
            for index, sample in enumerate(likeliest(output.outputs, n))
        ]
        if self.kind == "chat.completion":
            made |= prompt_logprobs(self.body, self.requests[0])
        made |= self._prompt_ids(0, chat=True)
        made["usage"] = await self._usage(outputs)
        if self.body.return_speculation:
            made["speculation"] = speculation_of(outputs)
        return made

    async def events(self, room: ExitStack) -> AsyncGenerator[str]:
        """Server-sent events: `first` of every choice, `delta` of each output, usage if asked for.

        An error after the first event is an event, too; one before it is raised.
        """
        options = self.body.stream_options or StreamOptions()
        opened = f"data: {dumps(self.head(self.chunk_kind))[:-1]},"
        asked, of_parts = options.include_usage, options.continuous_usage_stats
        usage = (of_parts if asked is None else asked) or self.server.options.enable_force_include_usage
        began, sent = False, SoFar(opened, {"usage": None} if usage else {})
        try:
            with naming(self.body):
                # with each draft tree, if these are asked for
                async with self.server.stream(self.requests, room, self.body.return_origins) as outputs:
                    async for i, output in outputs:
                        if text := self._grown(i, output, sent):
                            yield text
                            began = True
                async for text in self._last(sent):
                    yield text
        except Exception as error:
            if not began:
                raise
            yield event(api_error(error).body())
        yield DONE

    def _grown(self, i: int, output: RequestOutput, sent: SoFar) -> str:
        """The events of one output, together; "" if nothing is new."""
        if self.body.max_tokens == 0:
            without_text(output)
        options, made, counts = self.body.stream_options, list[str](), sent.counts
        for sample in output.outputs:
            index = i * self.body.n + sample.index
            if index in sent.complete:
                continue
            if sample.finish_reason is not None:
                sent.complete.add(index)
            if counts and options is not None and options.continuous_usage_stats:
                counts = {"usage": usage_so_far(output, sample)}
            for outer, part in self._parts(i, sample, sent.started, index):
                changing = {**outer, "choices": [{"index": index, **part}], **counts}
                made.append(f"{sent.opened}{dumps(changing)[1:]}\n\n")
        if output.finished:
            sent.ended.append(output)
        return "".join(made)

    async def _last(self, sent: SoFar) -> AsyncGenerator[str]:
        """The events behind those of the choices."""
        head = self.head(self.chunk_kind)
        if sent.counts:
            yield event({**head, "choices": [], "usage": await self._usage(sent.ended)})
        if self.body.return_speculation:
            yield event({**head, "choices": [], "speculation": speculation_of(sent.ended), **sent.counts})

    def _parts(
        self, i: int, sample: CompletionOutput, started: dict[int, int], index: int
    ) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
        """New parts of a choice, each after its fields outside of `choices`."""
        new, begins = self.choices.delta(i, sample), index not in started
        parts = [*self.choices.first(i, sample), *new] if begins else new
        if not (self.body.return_token_ids or self.body.return_origins or self._shows_prompt):
            started[index] = 0
            for part in parts:
                yield {}, part
            return
        for part in parts:
            outer, inner = self._prompt_ids(i, chat=True), self._prompt_ids(i, chat=False)
            if not begins:
                outer, inner = {}, dict.fromkeys(inner)
            begins, last = False, bool(new) and part is parts[-1]  # the last new one has the new tokens
            start = started.get(index, 0) if last else len(sample.token_ids)
            part |= {**inner, **self._token_ids(sample, start)}
            if last:
                part |= self._origins(sample, start)
                started[index] = len(sample.token_ids)
            started.setdefault(index, 0)
            yield outer, part

    async def _usage(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        samples = [sample for output in outputs for sample in output.outputs]
        counts = [await self.choices.reasoning_tokens(sample) for sample in samples]
        return usage_of(outputs, sum(counts))

    def _prompt_ids(self, i: int, chat: bool) -> dict[str, Any]:
        """Ids and text of a prompt, if they are asked for and are in this place.

        chat: beside the choices, as for chat; else in a choice, as for completions.
        """
        if chat != (self.kind == "chat.completion"):
            return {}
        made: dict[str, Any] = {}
        if self.body.return_token_ids:
            made["prompt_token_ids"] = self.requests[i].ids
        if self._shows_prompt:
            made["prompt_text"] = self.requests[i].prompt
        return made

    @property
    def _shows_prompt(self) -> bool:
        """Whether the text of the prompt is asked for, that a chat template has made."""
        return isinstance(self.body, ChatBody) and self.body.return_prompt_text

    def _token_ids(self, sample: CompletionOutput, start: int) -> dict[str, Any]:
        return {"token_ids": sample.token_ids[start:]} if self.body.return_token_ids else {}

    def _origins(self, sample: CompletionOutput, start: int) -> dict[str, Any]:
        if not self.body.return_origins:
            return {}
        return {"outrider": origins_of(sample, start, self.server.reader.piece)}


class Ids(NamedTuple):
    """shown: of a response.  own: of its request in the engine, from which those of its parts follow.

    The own one is unique, unless the body gives it: clients repeat a header when they try again.
    """

    shown: str
    own: str


def ids_of(body: Sampling, prefix: str) -> Ids:
    """Ids of the prefix with the body's request_id, the header X-Request-Id, or a random one."""
    if body.request_id is not None and len(body.request_id) > 200:
        raise ApiError(400, f"request_id {shortened(body.request_id, 20)} is too long.", "request_id")
    if body.request_id is not None:
        return Ids(f"{prefix}{body.request_id}", f"{prefix}{body.request_id}")
    headers = HEADERS.get({})
    shown = f"{prefix}{id_of(headers.get('x-request-id', ''))}"
    return Ids(shown, f"{shown}-{id_of(headers.get(ATTEMPT, ''))}")


def without_text(output: RequestOutput) -> RequestOutput:
    """The output of max_tokens=0, for which the engine has sampled one token."""
    for i, sample in enumerate(output.outputs):
        if sample.finish_reason in ("stop", "length"):
            logprobs: list[Entry] | None = None if sample.logprobs is None else []
            output.outputs[i] = CompletionOutput(sample.index, "", [], "length", logprobs=logprobs)
    return output


def likeliest(samples: Sequence[CompletionOutput], count: int) -> Sequence[CompletionOutput]:
    """The `count` samples with the highest mean log-probability of a token, best first, if there are more."""
    return samples if len(samples) == count else sorted(samples, key=_mean_logprob, reverse=True)[:count]


def _mean_logprob(sample: CompletionOutput) -> float:
    return (sample.cumulative_logprob or 0.0) / max(1, len(sample.token_ids))
