"""The ASGI application: routes and their OpenAPI document."""

from __future__ import annotations

from collections.abc import Coroutine
from functools import partial
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request
from starlette.responses import FileResponse, Response
from starlette.staticfiles import StaticFiles
from starlette.types import Lifespan

from outrider.serve import errors
from outrider.serve.answers import Job
from outrider.serve.chat import chat_job
from outrider.serve.completions import completion_job
from outrider.serve.errors import ApiError
from outrider.serve.guard import middleware
from outrider.serve.messages.job import Messages, count_of, message_job
from outrider.serve.messages.protocol import CountBody, MessagesBody, MessagesErrorBody
from outrider.serve.models import add_models
from outrider.serve.protocol import ChatBody, CompletionBody, ErrorBody, ResponsesBody
from outrider.serve.responses import Responses, response_job
from outrider.serve.sampling import naming
from outrider.serve.state import Server
from outrider.serve.wire import Events, Json, StrictRoute, unless_left
from outrider.version import VERSION

STATIC = Path(__file__).parent / "static"
POLICY = "default-src 'self'; frame-ancestors 'none'; base-uri 'none'"
STATUSES = {
    400: "Invalid request",
    401: "No valid API key",
    403: "Not allowed",
    404: "No such model or route",
    408: "Body too slow",
    413: "Body too long",
    422: "Invalid request",
    429: "No place for the request",
    503: "Not ready",
    504: "Took too long",
}
RESPONSES: dict[int | str, dict[str, Any]] = {
    status: {"description": text, "model": ErrorBody} for status, text in STATUSES.items()
}

OF_MESSAGES: dict[int | str, dict[str, Any]] = {
    status: {"description": text, "model": MessagesErrorBody} for status, text in STATUSES.items()
}


def make_app(server: Server, lifespan: Lifespan[FastAPI] | None = None) -> FastAPI:
    """The application of a server.  It serves before the engine is there: with status 503."""
    app = FastAPI(
        title="Outrider",
        version=VERSION,
        docs_url=None,  # these pages load scripts from other hosts
        redoc_url=None,
        responses=RESPONSES,
        lifespan=lifespan,
        middleware=middleware(server),
    )
    app.router.route_class = StrictRoute
    errors.install(app)
    add_generation(app, server)  # first: routes are tried in this order
    add_status(app, server)
    add_models(app, server)
    app.mount("/static", StaticFiles(directory=STATIC), name="static")
    return app


def add_status(app: FastAPI, server: Server) -> None:
    """The page at /, /health, /ping, /load, /version and /metrics."""

    @app.api_route("/", methods=["GET", "HEAD"], include_in_schema=False)
    async def page() -> Response:
        return FileResponse(STATIC / "index.html", headers={"Content-Security-Policy": POLICY})

    @app.get("/health", responses={200: {"description": "Requests are accepted"}})
    async def health() -> Json:
        """Status 200 while requests are accepted, 503 while loading or stopping and after a failure."""
        server.check_ready()
        return Json({"status": server.status})

    @app.get("/ping")
    @app.post("/ping")
    async def ping() -> Json:
        """/health, under the name that SageMaker requests."""
        return await health()

    @app.get("/load")
    async def load() -> Json:
        """Number of samples that are queued or running."""
        return Json({"server_load": server.open})

    @app.get("/version")
    async def version() -> Json:
        return Json({"version": VERSION})

    @app.get("/metrics", response_class=Response, responses={200: {"content": {"text/plain": {}}}})
    async def metrics() -> Response:
        """Metrics in the text format of Prometheus."""
        return Response(server.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")


def add_generation(app: FastAPI, server: Server) -> None:
    """/v1/completions, /v1/chat/completions, /v1/responses, /v1/messages and /v1/embeddings."""

    async def answered(work: Coroutine[Any, Any, Job | Responses | Messages]) -> Response:
        job = await work
        if not job.body.stream:
            return Json(await job.response())
        room = server.room(job.requests)
        return await Events.begun(job.events(room), room)

    @app.post("/v1/completions")
    async def completions(body: CompletionBody, request: Request) -> Response:
        """Continue texts."""
        with naming(body):
            return await unless_left(request.receive, answered(completion_job(server, body)))

    @app.post("/v1/chat/completions")
    async def chat(body: ChatBody, request: Request) -> Response:
        """Reply to a conversation."""
        with naming(body):
            return await unless_left(request.receive, answered(chat_job(server, body)))

    @app.post("/v1/responses")
    async def responses(body: ResponsesBody, request: Request) -> Response:
        """Reply to input items."""
        with naming(body):
            return await unless_left(request.receive, answered(response_job(server, body)))

    @app.post("/v1/messages", responses=OF_MESSAGES)
    async def messages(body: MessagesBody, request: Request) -> Response:
        """Reply to a conversation, in the shape of Anthropic's API."""
        with naming(body):
            return await unless_left(request.receive, answered(message_job(server, body)))

    @app.post("/v1/messages/count_tokens", responses=OF_MESSAGES)
    async def count_tokens(body: CountBody) -> Json:
        """Number of tokens of a conversation."""
        return Json(await server.apart(partial(count_of, server, body)))

    @app.post("/v1/embeddings")
    async def embeddings() -> Json:
        """Not supported: the server generates text."""
        raise ApiError(400, "embeddings are not supported: the server generates text.", code="unsupported")
