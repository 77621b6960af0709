"""Responses: JSON, and server-sent events that end when the client leaves."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping
from contextlib import ExitStack, aclosing, suppress
from typing import Any, TypeVar, cast

from fastapi.routing import APIRoute
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

T = TypeVar("T")
SEND_SECONDS = 60.0
DONE = "data: [DONE]\n\n"
# in a scope: the `send` below middleware and routes, which look at the start of a response only
DIRECT = "outrider.send"
# JSON in ASCII, since a text may hold half of a surrogate pair.
dumps = json.JSONEncoder(separators=(",", ":"), allow_nan=False).encode


class Json(Response):
    """Response of one JSON value."""

    media_type = "application/json"

    def __init__(self, value: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(dumps(value), status, headers)


class StrictRequest(Request):
    """Request whose JSON has finite numbers only."""

    async def json(self) -> Any:
        return strict_json(await self.body())


class StrictRoute(APIRoute):
    """Route that reads bodies as StrictRequest."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handler = super().get_route_handler()

        async def strict(request: Request) -> Response:
            return await handler(StrictRequest(request.scope, request.receive))

        return strict


def strict_json(text: str | bytes) -> Any:
    """The value of a JSON text.  Raises JSONDecodeError, also for numbers that are not finite."""
    try:
        return json.loads(text, parse_constant=_refused, parse_float=_finite)
    except json.JSONDecodeError:
        raise
    except (ValueError, RecursionError) as error:  # of bytes that are no text, long numbers, deep lists
        raise json.JSONDecodeError(str(error), "", 0) from error


def _refused(number: str) -> float:
    raise json.JSONDecodeError(f"{number[:20]} is no finite number", number, 0)


def _finite(number: str) -> float:
    return value if math.isfinite(value := float(number)) else _refused(number)


def event(value: Mapping[str, Any], name: str | None = None) -> str:
    """One server-sent event."""
    return f"{f'event: {name}' + chr(10) if name else ''}data: {dumps(value)}\n\n"


class Left(Exception):
    """The client has closed its connection."""


def is_closed(error: Exception) -> bool:
    """Whether it is uvloop's about a lost connection, before uvicorn knows that it is lost."""
    return isinstance(error, RuntimeError) and "the handler is closed" in str(error)


async def unless_left(receive: Receive, work: Coroutine[Any, Any, T], *ends: Coroutine[Any, Any, None]) -> T:
    """Result of `work`.  Cancels it and raises Left when the client leaves or one of `ends` has ended."""
    task, *watches = map(asyncio.ensure_future, (work, _left(receive), *ends))
    try:
        await asyncio.wait((task, *watches), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise Left
        return cast(T, task.result())
    finally:
        for each in (task, *watches):
            each.cancel()
        await asyncio.gather(task, *watches, return_exceptions=True)


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class Events(Response):
    """Server-sent events.  A client that reads nothing for SEND_SECONDS, twice that at most, is left."""

    media_type = "text/event-stream"

    def __init__(self, first: str, rest: AsyncGenerator[str], room: ExitStack) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self.first, self.rest, self.room = first, rest, room
        self.sent, self.sending = 0, False

    @staticmethod
    async def begun(events: AsyncGenerator[str], room: ExitStack) -> Events:
        """A response whose first event is there: an error before it is raised, so that it has a status."""
        try:
            return Events(await anext(events), events, room)
        except BaseException:
            room.close()
            raise

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self.room, suppress(Left, OSError):
            await unless_left(receive, self._stream(send, scope.get(DIRECT, send)), self._stuck())

    async def _stream(self, send: Send, direct: Send) -> None:
        async with aclosing(self.rest):
            start = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
            await send(start)
            await self._send(direct, self.first)
            async for text in self.rest:
                await self._send(direct, text)
            await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _send(self, send: Send, text: str) -> None:
        self.sending = True
        await send({"type": "http.response.body", "body": text.encode(), "more_body": True})
        self.sent, self.sending = self.sent + 1, False

    async def _stuck(self) -> None:
        """Return once a part has not been taken for SEND_SECONDS.  Cheaper than a timeout for each part."""
        before = -1
        while not self.sending or self.sent != before:
            before = self.sent if self.sending else -1
            await asyncio.sleep(SEND_SECONDS)
