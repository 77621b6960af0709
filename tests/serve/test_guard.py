"""Paths that need a key, and root paths, without an engine."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest
from starlette.testclient import TestClient

from outrider.errors import ConfigError
from outrider.serve.app import make_app
from outrider.serve.guard import Guard
from outrider.serve.options import ServerOptions


class Loading:
    """What a server has before its engine."""

    status = "loading"

    def __init__(self, options: ServerOptions) -> None:
        self.options = options


def client(root: str) -> TestClient:
    app = make_app(cast(Any, Loading(ServerOptions(api_key=("key",), root_path=root))))
    return TestClient(app, raise_server_exceptions=False)


ROOTS = ["", "/api", "/api/llm", "/static", "/static/llm", "/v1", "/health"]


@pytest.mark.parametrize("root", ROOTS)
def test_a_root_path_opens_no_route_that_needs_a_key(root: str) -> None:
    asked = client(root)
    for path in ("/v1/chat/completions", "/v1/completions", "/static/%2e%2e/v1/completions", "/tokenize"):
        assert asked.post(root + path, json={}).status_code == 401, path
        assert asked.get(root + path).status_code == 401, path


@pytest.mark.parametrize("root", ROOTS)
def test_the_page_needs_no_key_under_a_root_path(root: str) -> None:
    asked = client(root)
    for path in ("/", "/static/app.js", "/openapi.json", "/version"):
        assert asked.get(root + path).status_code == 200, path


@pytest.mark.parametrize("root", ["/api", "/api/llm", "/static/llm"])
def test_the_root_path_may_be_removed_by_the_proxy(root: str) -> None:
    asked = client(root)
    for path in ("/", "/static/app.js", "/openapi.json", "/version"):
        assert asked.get(path).status_code == 200, path
    assert asked.get("/v1/models").status_code == 401
    assert asked.get("/openapi.json").json()["servers"] == [{"url": root}]
    assert asked.get(root, follow_redirects=False).headers["location"].endswith(f"{root}/")


@pytest.mark.parametrize("root", ["api", "/api/", "/", "/a b", "//x", "/..", "/a?b"])
def test_other_texts_are_no_root_path(root: str) -> None:
    with pytest.raises(ConfigError, match="root_path"):
        ServerOptions(root_path=root)


def test_the_page_cannot_be_framed_and_answers_head() -> None:
    answer = client("").head("/")
    assert answer.status_code == 200 and not answer.content
    policy = answer.headers["Content-Security-Policy"]
    assert all(part in policy for part in ("default-src 'self'", "frame-ancestors 'none'", "base-uri 'none'"))


def test_a_part_for_a_closed_connection_is_no_error(caplog: pytest.LogCaptureFixture) -> None:
    """Its traceback was logged, at any client's wish."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})

    async def receive() -> Any:
        return {"type": "http.disconnect"}

    def asked(text: str) -> None:
        async def send(message: Any) -> None:
            raise RuntimeError(text)

        guard = Guard(app, cast(Any, Loading(ServerOptions())))
        scope = {"type": "http", "method": "GET", "path": "/", "headers": []}
        asyncio.run(guard(scope, receive, send))

    asked("unable to perform operation on <TCPTransport closed=True>; the handler is closed")
    assert not caplog.records
    asked("another one")
    assert "a request failed" in caplog.text
