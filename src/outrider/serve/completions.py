"""/v1/completions: text continued, from texts or token ids."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from outrider.core.logprobs import Entry
from outrider.outputs import CompletionOutput
from outrider.progress import Request
from outrider.requests import Prompt
from outrider.serve.answers import Job, ids_of
from outrider.serve.errors import ApiError
from outrider.serve.logprobs import TextOffsets, best_tokens, bounded, prompt_logprobs, token_name
from outrider.serve.protocol import CompletionBody
from outrider.serve.sampling import check_budget, check_logprobs, params_of
from outrider.serve.state import Server


async def completion_job(server: Server, body: CompletionBody) -> Job:
    """Check and tokenize a request.  Raises ApiError or RequestError."""
    adapter = server.adapter_of(body.model)
    check_logprobs(body, server.options.max_logprobs)
    check_budget(body, server.reasoning)
    candidates = _candidates(body)
    if body.suffix:
        raise ApiError(400, "suffix is not supported: text is continued, not filled in.", "suffix")
    if body.max_tokens == 0 and not body.echo:
        raise ApiError(
            400, "max_tokens must be at least 1, or 0 with echo to score the prompt.", "max_tokens"
        )
    if body.max_tokens == 0 and body.min_tokens:
        raise ApiError(
            400, f"min_tokens must be at most max_tokens (0), got {body.min_tokens}.", "min_tokens"
        )
    more: dict[str, Any] = {"max_tokens": body.max_tokens, "logprobs": body.logprobs, "n": candidates}
    if candidates > body.n and body.logprobs is None:
        more["logprobs"] = 0  # by which `likeliest` chooses
    if body.max_tokens == 0:
        more["max_tokens"] = 1  # which `without_text` leaves out
    if body.echo and body.logprobs is not None and body.prompt_logprobs is None:
        more["prompt_logprobs"] = body.logprobs
    params = params_of(body, server.llm.sampling, bounded=server.reasoning, **more)
    ids = ids_of(body, "cmpl-")
    prompts = _prompts(body) if body.add_special_tokens else await asyncio.to_thread(_encoded, server, body)
    requests = await server.read(prompts, params, ids.own, adapter, body.priority, body.cache_salt)
    made = Completion(server, body, requests)
    return Job(server, body, ids.shown, "text_completion", "text_completion", requests, made)


def _candidates(body: CompletionBody) -> int:
    """Samples of each prompt, of which n are returned.  Raises ApiError for a best_of that cannot be used."""
    if body.best_of is None:
        return body.n
    if body.best_of < body.n:
        raise ApiError(400, f"best_of must be at least n ({body.n}), got {body.best_of}.", "best_of")
    if body.stream and body.best_of > body.n:
        raise ApiError(400, "a stream has no best_of: the best sample is known at the end only.", "best_of")
    return body.best_of


def _prompts(body: CompletionBody) -> list[Prompt]:
    given: Any = body.prompt
    return [given] if isinstance(given, str) or isinstance(given[0], int) else list(given)


def _encoded(server: Server, body: CompletionBody) -> list[Prompt]:
    def ids(text: str) -> list[int]:
        return server.encode(text, False, endless=body.truncate_prompt_tokens is not None)

    return [
        {"prompt": each, "prompt_token_ids": ids(each)} if isinstance(each, str) else each
        for each in _prompts(body)
    ]


@dataclass
class Sent:
    """Progress of one choice, as sent: characters, and tokens."""

    offsets: TextOffsets  # of the next tokens
    characters: int = 0
    tokens: int = 0


@dataclass
class Completion:
    """`Choices` of texts."""

    server: Server
    body: CompletionBody
    requests: Sequence[Request]
    sent: dict[tuple[int, int], Sent] = field(default_factory=dict)

    def choice(self, i: int, sample: CompletionOutput) -> dict[str, Any]:
        request = self.requests[i]
        logprobs = None
        if self.body.logprobs is not None:
            ids, entries = self._echoed(request)
            ids, entries = [*ids, *sample.token_ids], [*entries, *(sample.logprobs or ())]
            logprobs = self._logprobs(ids, entries, self._offsets())
        return {
            "text": self._echo(request) + sample.text,
            "logprobs": logprobs,
            "finish_reason": sample.finish_reason,
            "stop_reason": sample.stop_reason,
            **prompt_logprobs(self.body, request),
        }

    def first(self, i: int, sample: CompletionOutput) -> list[dict[str, Any]]:
        """The prompt, if it is echoed."""
        request = self.requests[i]
        if not self.body.echo:
            return []
        logprobs = (
            None if self.body.logprobs is None else self._logprobs(*self._echoed(request), self._offsets())
        )
        return [{"text": self._echo(request), "logprobs": logprobs, "finish_reason": None}]

    def delta(self, i: int, sample: CompletionOutput) -> list[dict[str, Any]]:
        sent = self.sent.get((i, sample.index))
        if sent is None:
            sent = Sent(self._offsets())
            sent.offsets.of(self._echoed(self.requests[i])[0])
        text, ids = sample.text[sent.characters :], sample.token_ids[sent.tokens :]
        if not (text or sample.finish_reason):
            return []
        logprobs = None
        if sample.logprobs is not None:
            logprobs = self._logprobs(ids, sample.logprobs[sent.tokens :], sent.offsets)
        sent.characters, sent.tokens = len(sample.text), len(sample.token_ids)
        self.sent[i, sample.index] = sent
        part = {"text": text, "logprobs": logprobs, "finish_reason": sample.finish_reason}
        return [{**part, "stop_reason": sample.stop_reason}]

    async def reasoning_tokens(self, sample: CompletionOutput) -> int:
        return 0

    def _echoed(self, request: Request) -> tuple[Sequence[int], Sequence[Entry | None]]:
        """Tokens of the prompt and their entries, if `logprobs` covers them."""
        asked = request.rows[0].logprobs
        return (request.ids, asked.prompt) if self.body.echo and asked is not None else ((), ())

    def _offsets(self) -> TextOffsets:
        return TextOffsets(self.server.reader)

    def _echo(self, request: Request) -> str:
        if not self.body.echo:
            return ""
        text = None if request.truncated else request.prompt
        return self.server.decode(request.ids) if text is None else text

    def _logprobs(
        self, ids: Sequence[int], entries: Sequence[Entry | None], offsets: TextOffsets
    ) -> dict[str, Any]:
        """OpenAI's lists, one entry a token."""
        piece = self.server.reader.piece
        made: dict[str, list[Any]] = {name: [] for name in FIELDS}
        made["text_offset"] = offsets.of(ids)
        for token, entry in zip(ids, entries):
            text = piece(token)
            made["tokens"].append(token_name(token, text, self.body.return_tokens_as_token_ids))
            made["token_logprobs"].append(None if entry is None else bounded(entry[token].logprob))
            made["top_logprobs"].append(None if entry is None else self._best(token, entry))
        return made

    def _best(self, token: int, entry: Entry) -> dict[str, float]:
        """The best tokens and the sampled one, by their names; of several with one name the best."""
        found: dict[str, float] = {}
        for other in [*best_tokens(entry, self.body.logprobs or 0), token]:
            text = self.server.reader.piece(other)
            name = token_name(other, text, self.body.return_tokens_as_token_ids)
            found.setdefault(name, bounded(entry[other].logprob))
        return found


FIELDS = ("text_offset", "token_logprobs", "tokens", "top_logprobs")
