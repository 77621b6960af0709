"""What must not harm a server: wrong keys, long and slow bodies, crowds, clients that leave, its end."""

from __future__ import annotations

import contextlib
import json
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import openai
import pytest
from patience import HANG
from served import Served, forked

SECRET = "a secret prompt that no log may show"
LONG: dict[str, Any] = {"prompt": SECRET, "max_tokens": 900, "ignore_eos": True}
KEYS = ("first-key", "second-key", "third-key")


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    file = tmp_path_factory.mktemp("keys") / "keys"
    file.write_text(f"{KEYS[1]}\n\n")
    options = [
        "builtin",
        "--api-key-file",
        str(file),
        "--max-requests",
        "4",
        "--max-num-seqs",
        "2",
        "--max-body-bytes",
        "20000",
        "--body-timeout",
        "1",
        "--allowed-origins",
        "https://a.example",
        "--kv-cache-memory-bytes",
        "50000000",
        "--shutdown-timeout",
        "30",
        "--log-interval",
        "0.5",
    ]
    with forked(*options, environment={"OUTRIDER_API_KEY": f"{KEYS[0]} {KEYS[2]}"}) as running:
        yield running


def bearer(key: str = KEYS[0]) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def until(true: Callable[[], bool], seconds: float = HANG) -> None:
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def connected(server: Served, head: str, body: bytes = b"") -> socket.socket:
    host, port = server.url.removeprefix("http://").split(":")
    made = socket.create_connection((host, int(port)), timeout=HANG)
    made.sendall(head.replace("\n", "\r\n").encode() + b"\r\n\r\n" + body)
    return made


def posted(server: Served, body: dict[str, Any]) -> socket.socket:
    """A connection with a request whose answer no client reads."""
    data = json.dumps(body).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\nHost: x\nAuthorization: Bearer {KEYS[0]}\n"
        f"Content-Type: application/json\nContent-Length: {len(data)}"
    )
    return connected(server, head, data)


def test_every_key_is_accepted_and_no_other(guarded: Served) -> None:
    body = {"prompt": "a", "max_tokens": 1}
    for key in KEYS:
        assert guarded.post("/v1/completions", body, headers=bearer(key)).status_code == 200
    wrong: list[dict[str, str]] = [
        {},
        bearer("x"),
        bearer("a b"),
        {"Authorization": KEYS[0]},
        {"Authorization": f"Basic {KEYS[0]}"},
        bearer(KEYS[0][:-1]),
    ]
    for headers in wrong:
        for path in ("/v1/models", "/v1/completions", "/tokenize", "/v1/nothing", "/staticx", "//"):
            answer = guarded.post(path, body, headers=headers)
            assert answer.status_code == 401 and "Bearer" in answer.headers["WWW-Authenticate"]
            assert answer.json()["error"]["code"] == "invalid_api_key"
    with pytest.raises(openai.AuthenticationError):
        guarded.client("wrong").models.list()
    for path in ("/", "/static/app.js", "/health", "/version", "/metrics", "/openapi.json"):
        assert guarded.get(path).status_code == 200
    for path in ("/static/../v1/models", "/static/%2e%2e/v1/models", "/static/../../api.py"):
        assert "data" not in httpx.get(f"{guarded.url}{path}", timeout=HANG).text


def test_long_and_slow_bodies_are_refused(guarded: Served) -> None:
    long = {"prompt": "a" * 30_000}
    assert guarded.post("/v1/completions", long, headers=bearer()).status_code == 413

    def chunks() -> Iterator[bytes]:
        for _ in range(40):
            yield b" " * 1000

    answer = httpx.post(f"{guarded.url}/v1/completions", content=chunks(), headers=bearer(), timeout=HANG)
    assert answer.status_code == 413
    head = f"POST /v1/completions HTTP/1.1\nHost: x\nAuthorization: Bearer {KEYS[0]}\nContent-Length: 10"
    with connected(guarded, head, b"{") as slow:
        assert b" 408 " in slow.recv(1000)


def test_a_crowd_is_refused_until_there_is_room(guarded: Served) -> None:
    with httpx.stream(
        "POST",
        f"{guarded.url}/v1/completions",
        headers=bearer(),
        timeout=HANG,
        json={**LONG, "n": 4, "stream": True},
    ) as full:
        lines = full.iter_lines()
        next(lines)
        answer = guarded.post("/v1/completions", LONG, headers=bearer())
        assert answer.status_code == 429 and int(answer.headers["Retry-After"]) >= 1
        with pytest.raises(openai.RateLimitError):
            guarded.client(KEYS[0]).completions.create(model="builtin", prompt="a")
    until(guarded.idle)
    assert guarded.post("/v1/completions", {"prompt": "a"}, headers=bearer()).status_code == 200
    assert guarded.metric("request_refused_total") >= 2


@pytest.mark.parametrize("stream", [True, False])
def test_requests_of_clients_that_leave_end_at_once(stream: bool, guarded: Served) -> None:
    """Two run, two wait; none of them goes on."""
    for body in ({**LONG, "n": 4}, {**LONG, "n": 1}):
        before = guarded.metric("generation_tokens_total")
        with posted(guarded, {**body, "stream": stream}):
            until(lambda before=before: guarded.metric("generation_tokens_total") > before)
        until(guarded.idle)
        made = guarded.metric("generation_tokens_total") - before
        assert made < 0.8 * 900 * body["n"], "the request went on to its end"


def test_a_reader_that_stops_does_not_delay_others(guarded: Served) -> None:
    with posted(guarded, {**LONG, "stream": True, "logprobs": 20, "max_tokens": 300}):
        for _ in range(3):
            answer = guarded.post("/v1/completions", {"prompt": "a", "max_tokens": 5}, headers=bearer())
            assert answer.status_code == 200
        until(guarded.idle)


def test_only_allowed_origins_may_read(guarded: Served, server: Served) -> None:
    for origin, allowed in (("https://a.example", True), ("https://b.example", False)):
        headers = {**bearer(), "Origin": origin}
        answer = guarded.get("/v1/models", headers=headers)
        assert ("access-control-allow-origin" in answer.headers) == allowed
        asked = "authorization, content-type, x-stainless-lang"  # of OpenAI's client in a browser
        preflight = {
            "Origin": origin,
            "Access-Control-Request-Method": "POST",
            "Access-Control-Request-Headers": asked,
        }
        answer = httpx.options(f"{guarded.url}/v1/completions", headers=preflight, timeout=HANG)
        assert (answer.status_code == 200) == allowed
    plain = server.get("/v1/models", headers={"Origin": "https://a.example"})
    assert "access-control-allow-origin" not in plain.headers


def test_health_is_red_while_open_requests_end_before_a_stop() -> None:
    """A new connection gets that status, too, and the open request is answered."""
    with forked("builtin-draft", "--max-model-len", "512", "--max-num-seqs", "1") as server:
        body = {"prompt": "Once", "max_tokens": 400, "ignore_eos": True, "n": 8}
        with ThreadPoolExecutor(1) as pool:
            answer = pool.submit(server.post, "/v1/completions", body)
            while server.idle():
                time.sleep(0.01)
            server.process.send_signal(signal.SIGTERM)
            seen = set[tuple[int, str]]()
            while not answer.done():
                with contextlib.suppress(httpx.TransportError):  # after the last of them
                    health = server.get("/health")
                    seen.add((health.status_code, health.json().get("error", {}).get("code", "")))
            assert answer.result().status_code == 200 and (503, "stopping") in seen
        assert server.process.wait(HANG) == 0


@pytest.mark.parametrize("open_requests", [0, 1])
def test_a_second_signal_ends_all_at_once_and_without_a_traceback(open_requests: int) -> None:
    body = {"prompt": SECRET, "max_tokens": 1900, "ignore_eos": True, "stream": True}
    with forked("builtin-draft", "--shutdown-timeout", "60") as server, contextlib.ExitStack() as streams:
        for _ in range(open_requests):
            stream = httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=HANG)
            next(streams.enter_context(stream).iter_text())
        began = time.monotonic()
        server.process.send_signal(signal.SIGINT)
        assert server.stop() == 0 and time.monotonic() - began < 30
        assert "Traceback" not in server.log


def test_the_end_lets_open_requests_finish_and_the_log_has_no_secrets(guarded: Served) -> None:
    """Last of this file: it ends the server."""
    texts: list[str] = []

    def read() -> None:
        chunks = guarded.client(KEYS[0]).completions.create(
            model="builtin",
            stream=True,
            prompt=SECRET,
            max_tokens=400,
            logprobs=1,
            extra_body={"ignore_eos": True},
        )
        texts.extend(chunk.choices[0].finish_reason or "" for chunk in chunks)

    reader = threading.Thread(target=read)
    reader.start()
    until(lambda: guarded.metric("num_requests_running") > 0)
    guarded.process.send_signal(signal.SIGTERM)
    with pytest.raises((httpx.HTTPError, AssertionError)):
        for _ in range(1000):
            assert guarded.get("/health").status_code == 200
            time.sleep(0.01)
    reader.join(HANG)
    assert texts[-1] == "length" and guarded.process.wait(HANG) == 0
    assert not any(word in guarded.log for word in (SECRET, *KEYS)) and "Traceback" not in guarded.log
    assert "output" in guarded.log and "KV cache" in guarded.log  # the line about throughput
