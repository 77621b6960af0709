"""The router's application: its own routes, and all others passed on."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from urllib.parse import quote

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Mount, Route
from starlette.types import Lifespan, Receive, Scope, Send

from outrider.serve.errors import ApiError, refused
from outrider.serve.guard import middleware
from outrider.serve.replicas.metrics import metrics_of
from outrider.serve.replicas.relay import Pool, Question, Relay
from outrider.serve.replicas.router import LOADING, UNLOADING, Router
from outrider.serve.wire import Json, strict_json
from outrider.version import VERSION

LONGEST_TARGET = 8192
IN_QUERY = "%!$&'()*+,;=:@/?"  # characters that stay as they are
HANDLERS = {HTTPException: refused}  # a path of several lines matches no route
Handler = Callable[[Request], Awaitable[Response]]


def make_app(router: Router, lifespan: Lifespan[Starlette] | None = None) -> Starlette:
    """The application of a router."""
    routes = [
        *_own_routes(router),
        *(Route(path, _everywhere(router), methods=["POST"]) for path in (LOADING, UNLOADING)),
        Mount("/", passed_on(router, router.options.root_path)),
    ]
    return Starlette(
        routes=routes,
        middleware=middleware(router),
        exception_handlers=HANDLERS,
        lifespan=lifespan,
    )


def _own_routes(router: Router) -> list[Route]:
    """/health, /ping, /load, /version and /metrics."""

    async def health(_: Request) -> Response:
        router.check_ready()
        states = {str(replica.number): replica.state for replica in router.replicas}
        return Json({"status": router.status, "replicas": states}, 200 if router.ready() else 503)

    async def load(_: Request) -> Response:
        return Json({"server_load": router.open})

    async def version(_: Request) -> Response:
        return Json({"version": VERSION})

    async def metrics(_: Request) -> Response:
        return Response(await metrics_of(router), media_type="text/plain; version=0.0.4; charset=utf-8")

    return [
        Route("/health", health),
        Route("/ping", health, methods=["GET", "POST"]),
        Route("/load", load),
        Route("/version", version),
        Route("/metrics", metrics),
    ]


def passed_on(pool: Pool, root_path: str = "") -> Callable[[Scope, Receive, Send], Awaitable[None]]:
    """An application whose requests the replicas of a pool answer."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        question = await _question(root_path, Request(scope, receive))
        await Relay(pool, question)(scope, receive, send)

    return app


def _everywhere(router: Router) -> Handler:
    """Adapters are loaded and unloaded on all replicas."""

    async def app(request: Request) -> Response:
        question = await _question(router.options.root_path, request)
        try:
            given = strict_json(question.body)
            name = given.get("lora_name") if isinstance(given, dict) else None
        except ValueError:  # the replica refuses it
            name = None
        answer, body = await asyncio.shield(router.everywhere(question, name))
        return Response(body, answer.status, media_type="application/json")

    return app


async def _question(root_path: str, request: Request) -> Question:
    """The request as replicas get it.  Raises ApiError for a URL that is too long to pass on."""
    target = quote(request.scope["path"].removeprefix(root_path))  # it is decoded
    if query := request.scope["query_string"]:
        target += f"?{quote(query, IN_QUERY)}"
    if len(target) > LONGEST_TARGET:
        raise ApiError(414, f"the path and query may have {LONGEST_TARGET} characters at most.")
    return Question.of(request.method, target, list(request.headers.items()), await request.body())
