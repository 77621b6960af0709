"""Requests in a file, in the form of OpenAI's batches, answered by the routes of a server in this process.

A request:  {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": {…}}
An answer:  {"id": "batch_req_…", "custom_id": "a", "error": null,
             "response": {"status_code": 200, "request_id": "…", "body": {…}}}

A line that is no request has an answer with an `error` and without a `response`.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

import httpx

from outrider.errors import EngineError, first_line, shortened
from outrider.serve.app import make_app
from outrider.serve.guard import CHAT, COMPLETIONS
from outrider.serve.state import Server

URLS = (CHAT, COMPLETIONS, "/v1/responses", "/v1/messages")
OUTPUT_TOKENS = ("completion_tokens", "output_tokens")  # of `usage`: chats and completions; the others
FIELDS = ("custom_id", "method", "url", "body")
Answer = dict[str, Any]


@dataclass(frozen=True)
class BatchRequest:
    """A line of the file.  fault: why it is no request; its url and body mean nothing then."""

    custom_id: str | None
    url: str = ""
    body: Mapping[str, Any] | None = None
    fault: str = ""


@dataclass
class Tally:
    """Counts of a run.  refused: answers with a status of 400 or more.  unread: lines that are no request."""

    answered: int = 0
    refused: int = 0
    unread: int = 0
    output_tokens: int = 0

    def add(self, answer: Answer) -> None:
        response = answer["response"]
        if response is None:
            self.unread += 1
        elif response["status_code"] >= 400:
            self.refused += 1
        else:
            self.answered += 1
            usage = response["body"].get("usage") or {}
            self.output_tokens += next((usage[name] for name in OUTPUT_TOKENS if name in usage), 0)


def requests_in(lines: Iterable[str]) -> Iterator[BatchRequest]:
    """The request of every line that is not blank."""
    known = set[str]()
    for line in lines:
        if line.strip():
            request = _request(line)
            if request.custom_id is not None and request.custom_id in known:
                request = BatchRequest(None, fault=f"the custom_id {request.custom_id!r} occurs twice.")
            elif request.custom_id is not None:
                known.add(request.custom_id)
            yield request


def _request(line: str) -> BatchRequest:
    try:
        given = json.loads(line)
    except (ValueError, RecursionError) as error:
        return BatchRequest(None, fault=f"no JSON: {first_line(error)}.")
    if not isinstance(given, dict):
        return BatchRequest(None, fault=f"a request is an object, got {shortened(given)}.")
    name = given.get("custom_id")
    if not isinstance(name, str):
        return BatchRequest(None, fault=f"custom_id must be a string, got {shortened(name)}.")
    url, body = given.get("url"), given.get("body")
    if unknown := sorted(given.keys() - {*FIELDS}):
        fault = f"unknown field {unknown[0]!r}: a request has {', '.join(FIELDS)}."
    elif given.get("method") != "POST":
        fault = f"method must be POST, got {shortened(given.get('method'))}."
    elif url not in URLS:
        fault = f"url must be one of {', '.join(URLS)}, got {shortened(url)}."
    elif not isinstance(body, dict):
        fault = f"body must be an object, got {shortened(body)}."
    elif body.get("stream"):
        fault = "a batch has no streams: leave stream out."
    else:
        return BatchRequest(name, url, body)
    return BatchRequest(name, fault=fault)


def answered_in(lines: Iterable[str]) -> Iterator[tuple[str, str]]:
    """(custom_id, line) of the answers of an earlier run that need not be given again."""
    for line in lines:
        try:
            answer = json.loads(line)
            if answer["response"]["status_code"] < 400:
                yield answer["custom_id"], line.rstrip("\n")
        except (ValueError, KeyError, TypeError):  # a line that a kill has cut, or a request without answer
            continue


async def run_batch(
    server: Server, requests: Sequence[BatchRequest], at_once: int, write: Callable[[Answer], None]
) -> Tally:
    """Answer requests in their order, so many at once, and write each answer when it is there.

    Raises EngineError if the engine has stopped, and what `write` raises.
    """
    tally, left = Tally(), iter(requests)
    transport = httpx.ASGITransport(make_app(server))
    keys = server.options.keys()
    headers = {"authorization": f"Bearer {keys[0].decode()}"} if keys else {}

    async def work(client: httpx.AsyncClient) -> None:
        for request in left:
            answer = await _answer(client, request)
            if not server.engine.is_running:
                raise server.engine.error or EngineError("the engine has stopped.")
            tally.add(answer)
            write(answer)

    async with httpx.AsyncClient(transport=transport, base_url="http://batch", headers=headers) as client:
        client.timeout = httpx.Timeout(None)
        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(min(at_once, len(requests))):
                    group.create_task(work(client))
        except ExceptionGroup as several:
            raise several.exceptions[0] from several
    return tally


async def _answer(client: httpx.AsyncClient, request: BatchRequest) -> Answer:
    answer: Answer = {"id": f"batch_req_{uuid4().hex}", "custom_id": request.custom_id}
    if request.fault:
        return {**answer, "response": None, "error": {"code": "invalid_request", "message": request.fault}}
    reply = await client.post(request.url, json=request.body)
    response = {
        "status_code": reply.status_code,
        "request_id": reply.headers.get("x-request-id", answer["id"]),
        "body": reply.json(),
    }
    return {**answer, "response": response, "error": None}
