"""HTTP client of the load, whose processor time is small beside the server's: they share the machine.

A stream's events are kept as they came, and parsed once it has ended (with httpx 16 clients spend more on an
event than the server does).
"""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import httptools


@dataclass
class Answer:
    """Times of one request, in seconds from its start.  error: what went wrong."""

    began: float
    first: float = 0.0
    ended: float = 0.0
    tokens: int = 0
    error: str | None = None


class Connection(asyncio.Protocol):
    """Connection to a server of /v1/completions, for one stream at a time."""

    def __init__(self) -> None:
        self.parser = httptools.HttpResponseParser(self)
        self.parts: list[bytes] = []
        self.transport: asyncio.WriteTransport | None = None
        self.answer: Answer | None = None
        self.ended: asyncio.Future[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.WriteTransport)
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self.parser.feed_data(data)

    def connection_lost(self, error: Exception | None) -> None:
        self.transport = None
        if self.answer is not None and self.ended is not None and not self.ended.done():
            self.answer.error = f"connection lost: {error}"
            self.ended.set_result(None)

    def on_body(self, body: bytes) -> None:
        assert self.answer is not None
        if not self.answer.first and b'"choices":[{' in body.replace(b" ", b""):
            self.answer.first = time.perf_counter() - self.answer.began
        self.parts.append(body)

    def on_message_complete(self) -> None:
        assert self.answer is not None and self.ended is not None
        self.answer.ended = time.perf_counter() - self.answer.began
        if (status := self.parser.get_status_code()) != 200:
            self.answer.error = f"status {status}"
        self.parser = httptools.HttpResponseParser(self)
        if not self.ended.done():
            self.ended.set_result(None)

    async def ask(self, host: str, body: dict[str, Any]) -> Answer:
        """Send a request and wait for the end of its stream.  The number of tokens is that of `usage`."""
        assert self.transport is not None
        sent = json.dumps(body).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
        self.parts, self.ended = [], asyncio.get_running_loop().create_future()
        self.answer = answer = Answer(time.perf_counter())
        self.transport.write(f"{head}Content-Length: {len(sent)}\r\n\r\n".encode() + sent)
        await self.ended
        read(answer, b"".join(self.parts))
        return answer


def read(answer: Answer, text: bytes) -> None:
    """Take in the events of a stream."""
    for line in text.splitlines():
        if line.startswith(b"data: {") and (b'"usage"' in line or b'"error"' in line):
            event = json.loads(line[6:])
            if "error" in event:
                answer.error = str(event["error"])
            if event.get("usage"):
                answer.tokens = event["usage"]["completion_tokens"]


class Connections:
    """Connections to one server.  An idle one is used again."""

    def __init__(self, url: str) -> None:
        found = urlsplit(url)
        assert found.hostname is not None
        self.host, self.port, self.idle = found.hostname, found.port or 80, list[Connection]()

    async def ask(self, body: dict[str, Any]) -> Answer:
        """Send a request on an idle connection or a new one, again if the server has closed the idle one."""
        while True:
            while self.idle and self.idle[-1].transport is None:
                self.idle.pop()
            used = bool(self.idle)
            try:
                connection = self.idle.pop() if used else await self._opened()
            except OSError as error:
                return Answer(time.perf_counter(), error=repr(error))
            answer = await connection.ask(f"{self.host}:{self.port}", body)
            if connection.transport is not None:
                self.idle.append(connection)
            elif used and not connection.parts:
                continue
            return answer

    async def _opened(self) -> Connection:
        loop = asyncio.get_running_loop()
        _, connection = await loop.create_connection(Connection, self.host, self.port)
        return connection

    def close(self) -> None:
        """Close the idle connections."""
        for connection in self.idle:
            if connection.transport is not None:
                connection.transport.close()
