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
from outrider.serve.answers import Job, best_of, bounded, name_of, prompt_logprobs
from outrider.serve.errors import ApiError
from outrider.serve.protocol import CompletionBody
from outrider.serve.sampling import params_of
from outrider.serve.state import Server


async def completion_job(server: Server, body: CompletionBody) -> Job:
    """Check and tokenize a request.  Raises ApiError or RequestError."""
    adapter = server.adapter_of(body.model)
    if body.best_of not in (None, 1, body.n):
        raise ApiError(400, "best_of is not supported: ask for n samples with logprobs.", "best_of")
    if body.suffix:
        raise ApiError(400, "suffix is not supported: text is continued, not filled in.", "suffix")
    more: dict[str, Any] = {"max_tokens": body.max_tokens, "logprobs": body.logprobs}
    if body.echo and body.logprobs is not None and body.prompt_logprobs is None:
        more["prompt_logprobs"] = body.logprobs
    params = params_of(body, **more)
    id = name_of(body, "cmpl-")
    prompts = _prompts(body) if body.add_special_tokens else await asyncio.to_thread(_encoded, server, body)
    requests = await server.read(prompts, params, id, adapter, body.priority)
    made = Completion(server, body, requests)
    return Job(server, body, id, "text_completion", "text_completion", requests, made)


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
class Completion:
    """`Choices` of texts."""

    server: Server
    body: CompletionBody
    requests: Sequence[Request]
    sent: dict[tuple[int, int], tuple[int, int]] = field(default_factory=dict)  # characters and tokens

    def choice(self, i: int, sample: CompletionOutput) -> dict[str, Any]:
        request = self.requests[i]
        prefix = self._echo(request)
        logprobs = None
        if self.body.logprobs is not None:
            entries: list[Entry | None] = list(sample.logprobs or ())
            ids = list(sample.token_ids)
            if self.body.echo:
                asked = request.rows[0].logprobs
                entries = [*(asked.prompt if asked is not None else ()), *entries]
                ids = [*request.ids, *ids]
            logprobs = self._logprobs(ids, entries, 0)
        return {
            "text": prefix + sample.text,
            "logprobs": logprobs,
            "finish_reason": sample.finish_reason,
            "stop_reason": sample.stop_reason,
            **prompt_logprobs(self.body, request),
        }

    def first(self, i: int, sample: CompletionOutput) -> list[dict[str, Any]]:
        """The prompt, if it is echoed."""
        prefix = self._echo(self.requests[i])
        return [{"text": prefix, "logprobs": None, "finish_reason": None}] if prefix else []

    def delta(self, i: int, sample: CompletionOutput) -> list[dict[str, Any]]:
        characters, tokens = self.sent.get((i, sample.index), (0, 0))
        text, ids = sample.text[characters:], sample.token_ids[tokens:]
        if not (text or sample.finish_reason):
            return []
        self.sent[i, sample.index] = (len(sample.text), len(sample.token_ids))
        logprobs = None
        if sample.logprobs is not None:
            entries: list[Entry | None] = list(sample.logprobs[tokens:])
            logprobs = self._logprobs(ids, entries, characters)
        part = {"text": text, "logprobs": logprobs, "finish_reason": sample.finish_reason}
        return [{**part, "stop_reason": sample.stop_reason}]

    def _echo(self, request: Request) -> str:
        if not self.body.echo:
            return ""
        return self.server.decode(request.ids) if request.prompt is None else request.prompt

    def _logprobs(self, ids: Sequence[int], entries: Sequence[Entry | None], offset: int) -> dict[str, Any]:
        """OpenAI's lists, one entry a token."""
        piece = self.server.reader.piece
        made: dict[str, list[Any]] = {name: [] for name in FIELDS}
        for token, entry in zip(ids, entries):
            text = piece(token)
            made["tokens"].append(text)
            made["text_offset"].append(offset)
            made["token_logprobs"].append(None if entry is None else bounded(entry[token].logprob))
            made["top_logprobs"].append(None if entry is None else self._best(token, entry))
            offset += len(text)
        return made

    def _best(self, token: int, entry: Entry) -> dict[str, float]:
        """The best tokens and the sampled one, by their text; of several with one text the best."""
        found: dict[str, float] = {}
        for other in [*best_of(entry, self.body.logprobs or 0), token]:
            found.setdefault(self.server.reader.piece(other), bounded(entry[other].logprob))
        return found


FIELDS = ("text_offset", "token_logprobs", "tokens", "top_logprobs")
