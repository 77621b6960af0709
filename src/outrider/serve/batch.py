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
from dataclasses import dataclass, replace
from typing import Any
from uuid import uuid4

import httpx

from outrider.errors import ConfigError, EngineError, first_line, shortened
from outrider.serve.app import make_app
from outrider.serve.guard import CHAT, COMPLETIONS
from outrider.serve.state import Server
from outrider.serve.wire import dumps, strict_json

URLS = (CHAT, COMPLETIONS, "/v1/responses", "/v1/messages")
OUTPUT_TOKENS = ("completion_tokens", "output_tokens")  # of `usage`: chats and completions; the others
FIELDS = ("custom_id", "method", "url", "body")
ID = "batch_req_"  # with it begin the ids of answers
BEGINNING = f'{{"id": "{ID}'  # of a line with an answer
JSON = {"content-type": "application/json"}
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
    for number, line in enumerate(lines, 1):
        if line.strip():
            request = _request(line)
            if request.custom_id is not None and request.custom_id in known:
                request = BatchRequest(None, fault=f"the custom_id {request.custom_id!r} occurs twice.")
            if request.custom_id is None:
                request = replace(request, fault=f"line {number}: {request.fault}")
            else:
                known.add(request.custom_id)
            yield request


def _request(line: str) -> BatchRequest:
    try:
        given = strict_json(line)
    except ValueError as error:
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


def answered_in(lines: Sequence[str]) -> Iterator[tuple[str, str]]:
    """(custom_id, line) of the answers of an earlier run that need not be given again.

    lines: of a text that ends with a line break, with "" as the last one.
    Leaves out blank lines, refused answers, and a last line that an interruption has cut.
    Raises ConfigError for any other line: the file is not one of answers, and not to be changed.
    """
    for number, line in enumerate(lines, 1):
        if not line.strip() or (number == len(lines) and _is_cut(line)):
            continue
        try:
            answer = json.loads(line)
        except (ValueError, RecursionError):
            answer = None
        if not _is_answer(answer):
            raise ConfigError(f"line {number} is no answer.")
        if answer.get("response") and answer["response"]["status_code"] < 400:
            yield answer["custom_id"], line


def _is_cut(line: str) -> bool:
    """Whether a line is the beginning of an answer."""
    if not (line.startswith(BEGINNING) or BEGINNING.startswith(line)):
        return False
    try:
        json.loads(line)
    except (ValueError, RecursionError):
        return True
    return False


def _is_answer(value: Any) -> bool:
    if not isinstance(value, dict) or "custom_id" not in value:
        return False
    name, response, error = value["custom_id"], value.get("response"), value.get("error")
    if response is None:
        return isinstance(error, dict) and (name is None or isinstance(name, str))
    return (
        isinstance(name, str) and isinstance(response, dict) and isinstance(response.get("status_code"), int)
    )


async def run_batch(
    server: Server, requests: Sequence[BatchRequest], at_once: int, write: Callable[[Answer], None]
) -> None:
    """Answer requests in their order, so many at once, and write each answer when it is there.

    Raises EngineError if the engine has stopped, and what `write` raises.
    """
    left = iter(requests)
    transport = httpx.ASGITransport(make_app(server))
    keys = server.options.keys()
    headers = {"authorization": f"Bearer {keys[0].decode()}"} if keys else {}

    async def work(client: httpx.AsyncClient) -> None:
        for request in left:
            answer = await _answer(client, request)
            if not server.engine.is_running:
                raise server.engine.error or EngineError("the engine has stopped.")
            write(answer)

    async with httpx.AsyncClient(transport=transport, base_url="http://batch", headers=headers) as client:
        client.timeout = httpx.Timeout(None)
        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(min(at_once, len(requests))):
                    group.create_task(work(client))
        except ExceptionGroup as several:
            raise several.exceptions[0] from several


async def _answer(client: httpx.AsyncClient, request: BatchRequest) -> Answer:
    answer: Answer = {"id": f"{ID}{uuid4().hex}", "custom_id": request.custom_id}
    fault, content = request.fault, ""
    if not fault:
        try:
            content = dumps(request.body)
        except (ValueError, RecursionError) as error:  # nested more deeply than it is written
            fault = f"body cannot be sent: {first_line(error)}."
    if fault:
        return {**answer, "response": None, "error": {"code": "invalid_request", "message": fault}}
    reply = await client.post(request.url, content=content, headers=JSON)
    response = {
        "status_code": reply.status_code,
        "request_id": reply.headers.get("x-request-id", answer["id"]),
        "body": reply.json(),
    }
    return {**answer, "response": response, "error": None}
