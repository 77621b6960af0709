"""Clients that send the head of a request slowly or without end; no engine is loaded."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from patience import HANG
from starlette.types import ASGIApp

from outrider.serve.app import make_app
from outrider.serve.options import ServerOptions
from outrider.serve.run import Process
from outrider.serve.state import Server

LIMIT = 0.3  # seconds
HEAD = b"GET /version HTTP/1.1\r\nHost: x\r\n"


@contextmanager
def connected(app: ASGIApp | None = None) -> Iterator[socket.socket]:
    """A connection with a server that is loading, or with an application."""
    server = Server(ServerOptions(port=0, body_timeout=LIMIT, api_key=("secret",)), "model")
    process = Process(app or make_app(server), server)
    sockets = process._listening()
    assert sockets is not None
    thread = threading.Thread(target=process.run, args=(sockets,))
    thread.start()
    try:
        with socket.create_connection(sockets[0].getsockname(), timeout=HANG) as made:
            yield made
    finally:
        process.should_exit = True
        thread.join(HANG)
        assert not thread.is_alive()


def answer(connection: socket.socket, end: bytes = b"}") -> bytes:
    text = b""
    while not text.endswith(end):
        part = connection.recv(1000)
        assert part, "the connection was closed"
        text += part
    return text


def is_closed(connection: socket.socket) -> bool:
    """Whether the server ends a connection without another answer."""
    try:
        return connection.recv(1000) == b""
    except ConnectionError:
        return True


@pytest.mark.parametrize("sent", [b"", HEAD + b"X-A: ", HEAD + b"\r\n", HEAD + b"\r\n" + HEAD])
def test_a_slow_head_ends_its_connection(sent: bytes) -> None:
    """Also the second one of a connection."""
    with connected() as connection:
        connection.sendall(sent)
        if b"\r\n\r\n" in sent:
            assert answer(connection).startswith(b"HTTP/1.1 200 ")
            connection.sendall(b"" if sent.endswith(HEAD) else HEAD)
        assert is_closed(connection)


def test_a_slow_rest_of_a_refused_body_ends_its_connection() -> None:
    with connected() as connection:
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 1000000\r\n\r\n")
        assert answer(connection).startswith(b"HTTP/1.1 401 ")
        deadline = time.monotonic() + HANG
        with pytest.raises(ConnectionError):
            while time.monotonic() < deadline:
                connection.sendall(b" ")
                time.sleep(LIMIT / 10)


def test_an_endless_head_is_refused() -> None:
    with connected() as connection, pytest.raises(ConnectionError):
        connection.sendall(HEAD)
        for _ in range(1000):
            connection.sendall(b"X-A: " + b"a" * 60_000 + b"\r\n")
            time.sleep(0.001)


@pytest.mark.parametrize(
    "sent",
    [
        b"\x00\x01\r\n\r\n",
        b"GET /\xff HTTP/1.1\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nContent-Length: -5\r\n\r\n",
    ],
)
def test_malformed_http_gets_an_error_in_openais_shape(sent: bytes) -> None:
    with connected() as connection:
        connection.sendall(sent)
        head, body = answer(connection).split(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 400 ") and b"content-type: application/json" in head
        error = json.loads(body)["error"]
        assert error["type"] == "invalid_request_error" and error["param"] is None and error["message"]
        assert is_closed(connection)


def test_a_slow_answer_is_no_slow_head() -> None:
    async def slow(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            await asyncio.sleep(3 * LIMIT)
            await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
            await asyncio.sleep(3 * LIMIT)
            await send({"type": "http.response.body", "body": b"ok"})

    with connected(slow) as connection:
        for _ in range(2):
            connection.sendall(HEAD + b"\r\n")
            assert answer(connection, b"ok").startswith(b"HTTP/1.1 200 ")
