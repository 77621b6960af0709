"""Errors in OpenAI's shape, {"error": {"message", "type", "param", "code"}}; in Anthropic's on its routes."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException

from outrider.errors import ContextError, EngineError, RequestError, nearest, shortened
from outrider.serve.protocol import CURES, UNSUPPORTED
from outrider.serve.wire import Json

TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "service_unavailable_error",
    504: "timeout_error",
}
MESSAGE_TYPES = {  # names of Anthropic's API
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
MESSAGES = re.compile(r"/v1/messages(/|$)")  # in paths of Anthropic's API
TOO_LONG = "context_length_exceeded"
UNIONS = {  # of fields with several types: pydantic reports the fault of the first one only
    "prompt": "Input should be a text, a list of token ids, or a list of 1 to 1024 of these",
    "stop": "Input should be a text that is not empty, or a list of such",
    "input": "Input should be a text or a list of at least one item",
    "tool_choice": "Input should be a text or an object",
}
TEXT = "the server generates text"
STORED = "nothing is stored between requests"
PREFIXES = "it is not supported: old pages make room for new ones, and cache_salt keeps a prompt apart"
OTHER_ROUTES = {  # routes of other servers -> why they are not here, and what to do instead
    r"(/v\d)?/(score|rerank|embeddings?|classify)|/pooling": f"it is not supported: {TEXT}",
    r"/v1/(audio|images|realtime|videos)(/.*)?": f"it is not supported: {TEXT}",
    r"/v1/(batches|files|fine_tuning|threads|assistants|vector_stores)(/.*)?": STORED,
    r"/v1/messages/batches(/.*)?": STORED,
    r"/v1/responses/.*": "responses are not stored",
    r"/(reset_prefix_cache|reset_mm_cache)": PREFIXES,
    r"/(sleep|wake_up|is_sleeping)": "it is not supported: stop the server to free its memory",
    r"/server_info|/props": "see /version, /v1/models and /metrics",
    r"/slots": "see /load and /metrics",
    r"/tokenizer_info": "/tokenize has the tokens of a text",
    r"/inference/v1/generate|/infill": "see /v1/completions, which takes token ids, too",
    r"/api/(generate|chat|tags|show)": "see /v1/chat/completions: this is no server of Ollama's API",
    r"/(docs|redoc)": "see /openapi.json",
}
log = logging.getLogger("outrider.serve")


class ApiError(Exception):
    """Refusal of a request.  param: the field at fault.  retry_after: seconds."""

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        code: str | None = None,
        retry_after: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code
        self.headers = {} if retry_after is None else {"Retry-After": str(retry_after)}
        if status == 401:
            self.headers["WWW-Authenticate"] = 'Bearer realm="outrider"'

    def body(self) -> dict[str, Any]:
        kind = TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        code = self.code or str(self.status)
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": code}}

    def message_body(self) -> dict[str, Any]:
        """The body in Anthropic's shape, with `code` if it has more than the type."""
        kind = MESSAGE_TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "api_error")
        text = self.message
        if self.code == TOO_LONG:  # by these words clients know that they have to shorten a conversation
            text = f"prompt is too long: {text}"
        fault = {"type": kind, "message": text, **({} if self.code is None else {"code": self.code})}
        return {"type": "error", "error": fault}

    def response(self, path: str = "") -> Json:
        """The response to a request of a path."""
        body = self.message_body() if MESSAGES.search(path) else self.body()
        return Json(body, self.status, self.headers)


def aborted() -> ApiError:
    """Error for a text that was ended before its end: what there is of it is no answer."""
    return ApiError(503, "the request was aborted.", code="aborted", retry_after=5)


def not_ready(status: str) -> ApiError:
    """The error of a server that is "loading" or "stopping"."""
    return ApiError(503, f"the server is {status}.", code=status, retry_after=5)


def api_error(error: Exception) -> ApiError:
    """The error that a client gets for an exception.  Unexpected ones are logged."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, RequestValidationError):
        return of_validation(error)
    if isinstance(error, HTTPException):
        refusal = ApiError(error.status_code, str(error.detail))
        refusal.headers.update(error.headers or {})
        return refusal
    if isinstance(error, RequestError):
        code = TOO_LONG if isinstance(error, ContextError) else None
        return ApiError(400, str(error), error.param, code)
    if isinstance(error, EngineError):
        return ApiError(503, str(error), code="engine_error", retry_after=5)
    if isinstance(error, TimeoutError):
        return ApiError(504, "the request took longer than the server allows.", code="timeout")
    if isinstance(error, RecursionError):
        return ApiError(400, "the request is nested too deeply.")
    log.error("a request failed", exc_info=error)
    return ApiError(500, f"an unexpected {type(error).__name__}; the log of the server has more.")


def of_validation(error: RequestValidationError) -> ApiError:
    """The first fault of a body, named by its field and with its value."""
    first: Mapping[str, Any] = error.errors()[0]
    if first["type"] == "json_invalid":
        return ApiError(400, f"the body is no JSON: {first['ctx']['error']}.", code="invalid_json")
    place = [str(part) for part in _place(first, error.body)]
    param = ".".join(place)
    if first["type"] == "extra_forbidden":
        hint = UNSUPPORTED.get(param)
        text = f"{param} is not supported: {hint}." if hint else f"unknown field {place[-1]!r}."
        return ApiError(400, text, param, "unknown_parameter")
    several = len(first["loc"]) > len(place) + (first["loc"][:1] == ("body",))  # a type of a union follows
    message = (several and UNIONS.get(param)) or first["msg"].removeprefix("Value error, ")
    if param in CURES:
        message = CURES[param]
    if not param and first["type"] in ("missing", "model_attributes_type"):
        message = "it must be a JSON object, sent with the header Content-Type: application/json"
    elif first["type"] != "missing":
        message += f", got {shortened(first['input'], 60)}"
    return ApiError(400, f"{param or 'the body is invalid'}: {message}", param or None)


def _place(fault: Mapping[str, Any], body: Any) -> list[str | int]:
    """Keys and indices of a fault, without those that pydantic adds for the types of a union."""
    place: list[str | int] = []
    loc = fault["loc"]
    for part in loc[1:] if loc[:1] == ("body",) else loc:
        try:
            body = body[part]
        except (LookupError, TypeError):
            return [*place, part] if fault["type"] == "missing" else place
        place.append(part)
    return place


def _other_route(request: Request) -> str:
    """What to ask instead of a route that there is not: a known reason, the nearest one, or their list."""
    path = request.url.path.removeprefix(str(request.scope.get("root_path", "")))
    for pattern, reason in OTHER_ROUTES.items():
        if re.fullmatch(pattern, path):
            return f"{reason}."
    paths = [str(getattr(route, "path", "")) for route in request.app.routes]
    near = nearest(request.url.path, paths).strip()
    return near.replace("Did", "did") or "see /openapi.json."


async def refused(request: Request, error: Exception) -> Json:
    """Handler of an exception for an application."""
    refusal, path = api_error(error), shortened(request.url.path)[1:-1]
    if isinstance(error, HTTPException):  # of the router, whose texts name nothing
        if error.status_code == 404:
            refusal.message = f"there is no route {path}: {_other_route(request)}"
        if error.status_code == 405:
            allowed = refusal.headers.get("Allow")
            refusal.message = f"{request.method} {path} is not allowed, only {allowed}."
    return refusal.response(request.url.path)


def install(app: FastAPI) -> None:
    """Give every error of the routes the shape of their API."""
    for kind in (RequestValidationError, HTTPException, ApiError, RequestError, EngineError, TimeoutError):
        app.add_exception_handler(kind, refused)
