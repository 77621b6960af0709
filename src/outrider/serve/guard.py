"""Checks of a request before its route: state of the server, keys, size and time of its body."""

from __future__ import annotations

import asyncio
import hmac
import logging
from contextlib import suppress
from typing import Protocol

from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from outrider.serve.errors import ApiError, api_error, not_ready
from outrider.serve.options import ServerOptions
from outrider.serve.traces import HEADERS
from outrider.serve.wire import DIRECT, Left, is_closed, strict_json

# routes that need no key and answer in every state; "" is redirected to "/"
OPEN = ("", "/", "/health", "/ping", "/load", "/version", "/metrics", "/openapi.json")
FILES = "/static/"  # of the page at /, which has no data and prompts for the key itself
INVOCATIONS = "/invocations"  # SageMaker's route, whose body may be that of a chat or of completions
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
GENERATING = (COMPLETIONS, CHAT, "/v1/responses", "/v1/messages", INVOCATIONS)
log = logging.getLogger("outrider.serve")


class Gate(Protocol):
    """The part of a server or router that admits requests.  status: "loading", "ready" or "stopping"."""

    options: ServerOptions
    status: str

    def check_ready(self) -> None: ...

    def check_room(self, samples: int = 1) -> None: ...


class Guard:
    """ASGI middleware in front of all routes.

    The whole body is read here, within its limits of size and time, so a slow or endless one occupies
    nothing else.  Only routes that need a key have bodies: those of other requests are left out.
    """

    def __init__(self, app: ASGIApp, server: Gate) -> None:
        self.app, self.server, self.keys = app, server, server.options.keys()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        started = False

        async def noted(message: Message) -> None:
            nonlocal started
            started = started or message["type"] == "http.response.start"
            await send(message)

        scope[DIRECT] = send
        try:
            path = self._routed(scope)
            public = path in OPEN or (path.startswith(FILES) and ".." not in path)
            if not public and scope["method"] != "OPTIONS":
                self._check(scope, path)
            reads = scope["method"] == "POST" and not public
            body = await self._body(scope, receive) if reads else b""
            if path == INVOCATIONS and reads:
                scope["path"] = scope["path"].removesuffix(path) + _invoked(body)
            receive = _replayed(body, receive)
            HEADERS.set({name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]})
            await self.app(scope, receive, noted)
        except Left:
            log.debug("a client left")
        except Exception as error:
            if is_closed(error):
                log.debug("a client left")
                return
            refusal = api_error(error)
            if not started:
                await refusal.response(scope["path"])(scope, receive, send)

    def _routed(self, scope: Scope) -> str:
        """The path that the routes see, without `root_path`.

        A proxy may have removed `root_path` from the path: it is put back, as mounted routes need it.
        """
        scope["root_path"] = root = self.server.options.root_path
        if root and scope["path"] != root and not scope["path"].startswith(f"{root}/"):
            scope["path"] = root + scope["path"]
        return str(scope["path"]).removeprefix(root)

    def _check(self, scope: Scope, path: str) -> None:
        """Raise ApiError for a wrong key, and for a request that would only wait."""
        if self.keys and not self._has_key(scope):
            raise ApiError(401, "the API key is missing or wrong.", code="invalid_api_key")
        if self.server.status == "stopping":
            raise not_ready(self.server.status)
        if path in GENERATING:
            self.server.check_ready()
            self.server.check_room()

    def _has_key(self, scope: Scope) -> bool:
        """Whether the header Authorization has a key as a Bearer token, or x-api-key has one.

        Every key is compared, and in constant time.
        """
        right = 0
        for name, value in scope["headers"]:
            kind, _, given = value.partition(b" ")
            if name == b"x-api-key":
                given = value
            elif name != b"authorization" or kind.lower() != b"bearer":
                continue
            right += sum(hmac.compare_digest(given.strip(), key) for key in self.keys)
        return right > 0

    async def _body(self, scope: Scope, receive: Receive) -> bytes:
        """The body of a request.  Raises ApiError if it is too long or too slow, Left without an end."""
        most = self.server.options.max_body_bytes
        length = next((value for name, value in scope["headers"] if name == b"content-length"), b"0")
        if not length.isdigit() or len(length) > 18 or int(length) > most:
            raise _too_large(most)
        parts, size = [], 0
        try:
            async with asyncio.timeout(self.server.options.body_timeout):
                more = True
                while more:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise Left
                    parts.append(message.get("body", b""))
                    size += len(parts[-1])
                    more = message.get("more_body", False)
                    if size > most:
                        raise _too_large(most)
        except TimeoutError:
            raise ApiError(408, "the body of the request came too slowly.", code="timeout") from None
        return b"".join(parts)


def middleware(server: Gate) -> list[Middleware]:
    """Middleware of all routes: CORS where other pages may call the server, and the guard."""
    guard = Middleware(Guard, server=server)
    if not (origins := server.options.allowed_origins):
        return [guard]
    allowed = Middleware(
        CORSMiddleware,
        allow_origins=list(origins),
        allow_methods=["GET", "POST"],
        allow_headers=["*"],  # OpenAI's client in a browser sends its version and more
    )
    return [allowed, guard]


def _invoked(body: bytes) -> str:
    """The route that a body of SageMaker's is for."""
    with suppress(ValueError):
        given = strict_json(body)
        if isinstance(given, dict) and "prompt" in given and "messages" not in given:
            return COMPLETIONS
    return CHAT


def _too_large(most: int) -> ApiError:
    return ApiError(413, f"the body of a request may have {most} bytes at most.", code="too_large")


def _replayed(body: bytes, receive: Receive) -> Receive:
    """A `receive` that gives the body once, then what the connection has."""
    left: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def replay() -> Message:
        return left.pop() if left else await receive()

    return replay
