"""Failures inside a server, which a client cannot cause: the application runs in this process."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import pty
import re
import shutil
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from patience import HANG

from outrider import AsyncLLM, SamplingParams
from outrider.progress import Request
from outrider.sampling.grammar.compiler import GrammarCompiler
from outrider.serve import log as serve_log
from outrider.serve.app import make_app
from outrider.serve.log import log_throughput
from outrider.serve.options import ServerOptions
from outrider.serve.run import Process, log_address, watch_engine
from outrider.serve.state import Server, cancelled
from outrider.serve.wire import Events

BODY: dict[str, Any] = {"prompt": "The future of AI is", "max_tokens": 30, "ignore_eos": True}


@pytest.fixture(scope="module")
def engine() -> Iterator[AsyncLLM]:
    made = AsyncLLM("builtin", max_model_len=256, max_num_seqs=4)
    yield made
    made.shutdown()


def ask(
    engine: AsyncLLM | None, task: Callable[[httpx.AsyncClient], Awaitable[None]], **options: Any
) -> None:
    """Run a task with a client of a new server on the engine; None: it is still loading."""

    async def run() -> None:
        server = Server(ServerOptions(**options), "builtin")
        if engine is not None:
            server.started(engine)
        transport = httpx.ASGITransport(make_app(server))
        async with httpx.AsyncClient(transport=transport, base_url="http://test", timeout=60) as client:
            await task(client)
        assert server.open == 0

    asyncio.run(run())


def failing(engine: AsyncLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the next step fail."""

    def fail(*_: object) -> None:
        monkeypatch.undo()
        raise ZeroDivisionError("a defect")

    monkeypatch.setattr(engine.llm.engine.runner, "begin", fail)


def test_throughput_is_logged_while_there_is_any(
    engine: AsyncLLM, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO, "outrider.serve")
    looks, look = 0, serve_log.counts_of

    def counted(of: Any) -> Any:
        nonlocal looks
        looks += 1
        return look(of)

    async def intervals(number: int) -> None:
        """Return when as many intervals are over, however long they took."""
        end = looks + number
        while looks < end:
            await asyncio.sleep(0.001)

    monkeypatch.setattr(serve_log, "counts_of", counted)

    async def task() -> None:
        server = Server(ServerOptions(log_interval=0.02), "builtin")
        logger = asyncio.create_task(log_throughput(server))
        server.started(engine)
        await engine.complete(BODY["prompt"], SamplingParams(max_tokens=8, ignore_eos=True))
        await intervals(3)  # one line, or two, and then none
        before = len(caplog.records)
        await intervals(3)
        assert len(caplog.records) == before > 0
        await cancelled([logger])

    asyncio.run(task())
    line = r"prompt [\d.]+ tokens/s, output [1-9][\d.]+ tokens/s, running \d, waiting 0, KV cache [\d.]+%, "
    assert re.match(line + r"prefix hits 0.0%", caplog.messages[-1])


def test_a_loading_server_answers_503() -> None:
    async def task(client: httpx.AsyncClient) -> None:
        for answer in (await client.get("/health"), await client.post("/v1/completions", json=BODY)):
            assert answer.status_code == 503 and answer.json()["error"]["code"] == "loading"
            assert "Retry-After" in answer.headers
        assert (await client.get("/version")).status_code == (await client.get("/metrics")).status_code == 200

    ask(None, task)


LOADING = """
import sys, time
from outrider.serve.options import ServerOptions
from outrider.serve.run import Service, run

class Slow(Service):
    def load(self):
        print("loading", flush=True)
        time.sleep(600)

key, certificate, port = sys.argv[1:]
run(Slow(ServerOptions(port=int(port), ssl_keyfile=key, ssl_certfile=certificate), {"model": "model"}))
"""


@pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl")
def test_a_signal_ends_a_loading_server_with_tls(tmp_path: Path) -> None:
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    files = ["-keyout", key, "-out", certificate]
    request = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-subj", "/CN=localhost"]
    subprocess.run([*request, *files], check=True, capture_output=True)
    trust = ssl.create_default_context(cafile=str(certificate))
    trust.check_hostname = False
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, "-c", LOADING, key, certificate, str(port)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None and process.stdout.readline() == b"loading\n"
        transport = httpx.HTTPTransport(verify=trust, retries=10)
        with httpx.Client(transport=transport, timeout=HANG) as client:
            assert client.get(f"https://127.0.0.1:{port}/health").status_code == 503
        process.terminate()
        assert process.wait(HANG) == 0
    finally:
        process.kill()


ASKING = """
import sys
from outrider.serve.options import ServerOptions
from outrider.serve.run import Process
from outrider.serve.state import Server

key, certificate, port = sys.argv[1:]
options = ServerOptions(port=int(port), ssl_keyfile=key, ssl_certfile=certificate)
process = Process(None, Server(options, "model"))
process._load_config()
print("loaded", process.config.ssl.check_hostname)
"""


@pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl")
@pytest.mark.parametrize("word", ["right", "wrong"])
def test_the_passphrase_of_a_key_is_asked_once(word: str, tmp_path: Path) -> None:
    """By a process with a terminal of its own."""
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    request = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-passout", "pass:right", "-subj", "/CN=x"]
    subprocess.run([*request, "-keyout", key, "-out", certificate], check=True, capture_output=True)
    pid, terminal = pty.fork()
    if pid == 0:
        os.execv(sys.executable, [sys.executable, "-c", ASKING, str(key), str(certificate), "0"])
    output, answers = b"", 0
    with contextlib.suppress(OSError):  # the end of the process
        while part := os.read(terminal, 1000):
            output += part
            if output.count(b"pass phrase") > answers:
                answers += 1
                os.write(terminal, f"{word}\n".encode())
    os.close(terminal)
    os.waitpid(pid, 0)
    assert answers == 1, output
    assert (b"loaded" in output) == (word == "right")
    assert word == "right" or b"ConfigError: ssl_keyfile" in output


def test_a_grammar_that_compiles_delays_no_other_request(
    engine: AsyncLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    began, go_on = threading.Event(), threading.Event()
    compile = GrammarCompiler._compile

    def slow(self: GrammarCompiler, form: Any) -> Any:
        began.set()
        assert go_on.wait(HANG)
        return compile(self, form)

    monkeypatch.setattr(GrammarCompiler, "_compile", slow)
    constrained = SamplingParams(structured_outputs={"regex": "[ab]{3}"})
    read = engine.llm.reader.request
    with ThreadPoolExecutor(2) as pool:
        waiting = pool.submit(read, "a", "One", constrained)
        assert began.wait(HANG)
        plain = pool.submit(read, "b", "Two", SamplingParams(bad_words=["no"]))
        try:
            assert plain.result(HANG / 2).id == "b" and not waiting.done()
        finally:
            go_on.set()
        assert isinstance(waiting.result(HANG), Request)


def test_a_request_that_takes_too_long_ends(engine: AsyncLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """After its first token."""
    begin = engine.llm.engine.runner.begin

    def slow(*given: Any) -> Any:
        time.sleep(0.03)
        return begin(*given)

    monkeypatch.setattr(engine.llm.engine.runner, "begin", slow)

    async def task(client: httpx.AsyncClient) -> None:
        slow = {**BODY, "max_tokens": 200, "n": 8}
        answer = await client.post("/v1/completions", json=slow)
        assert answer.status_code == 504 and answer.json()["error"]["code"] == "timeout"
        text = (await client.post("/v1/completions", json={**slow, "stream": True})).text
        assert '"text":' in text and '"code":"timeout"' in text and text.endswith("data: [DONE]\n\n")
        while engine.llm.loop.tickets:
            await asyncio.sleep(0.001)

    ask(engine, task, request_timeout=1.0)


def test_a_defective_request_fails_alone(engine: AsyncLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    async def task(client: httpx.AsyncClient) -> None:
        monkeypatch.setattr("outrider.serve.answers.usage_of", lambda _: 1 / 0)
        answer = await client.post("/v1/completions", json=BODY)
        assert answer.status_code == 500 and answer.json()["error"]["type"] == "server_error"
        assert "division" not in answer.text
        given = {**BODY, "stream": True, "stream_options": {"include_usage": True}}
        assert '"server_error"' in (await client.post("/v1/completions", json=given)).text
        monkeypatch.undo()
        assert (await client.post("/v1/completions", json=BODY)).status_code == 200

    ask(engine, task)


def test_a_failed_step_ends_its_requests_and_the_engine_goes_on_if_asked_to(
    engine: AsyncLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def task(client: httpx.AsyncClient) -> None:
        engine.restart_on_error = True
        failing(engine, monkeypatch)
        answer = await client.post("/v1/completions", json=BODY)
        assert answer.status_code == 503 and answer.json()["error"]["code"] == "engine_error"
        assert (await client.get("/health")).status_code == 200
        assert (await client.post("/v1/completions", json=BODY)).status_code == 200
        assert "outrider:engine_restarts_total 1.0" in (await client.get("/metrics")).text

    ask(engine, task)


def test_a_reader_that_stops_leaves_its_place(engine: AsyncLLM) -> None:
    async def run() -> None:
        server = Server(ServerOptions(max_requests=1), "builtin")
        server.started(engine)
        requests = await server.read(["a"], SamplingParams(max_tokens=3), "1")
        with server.room(requests) as room:
            async with server.stream(requests, room) as outputs, asyncio.timeout(HANG):
                await anext(outputs)
                while server.open:
                    await asyncio.sleep(0.001)
        assert server.open == 0

    asyncio.run(run())


def test_a_reader_that_never_takes_a_part_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("outrider.serve.wire.SEND_SECONDS", 0.02)
    left = ExitStack()
    closed: list[bool] = []
    left.callback(lambda: closed.append(True))

    async def parts() -> AsyncGenerator[str]:
        for _ in range(5):
            await asyncio.sleep(0.03)  # a slow engine is no stuck reader
            yield "data: a\n\n"

    async def forever() -> Any:
        await asyncio.Event().wait()

    sent: list[bytes] = []

    async def send(message: Any) -> None:
        sent.append(message.get("body", b""))
        if len(sent) == 4:
            await forever()

    async def run() -> None:
        await (await Events.begun(parts(), left))({"type": "http"}, forever, send)

    asyncio.run(asyncio.wait_for(run(), HANG))
    assert len(sent) == 4 and closed == [True]


def test_a_failed_step_turns_health_red(engine: AsyncLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Last of this file: it stops the engine."""

    async def task(client: httpx.AsyncClient) -> None:
        engine.restart_on_error = False
        failing(engine, monkeypatch)
        streamed = {**BODY, "stream": True}
        answers = await asyncio.gather(
            *(client.post("/v1/completions", json=body) for body in (BODY, BODY, streamed))
        )
        assert [answer.status_code for answer in answers[:2]] == [503, 503]
        assert "engine_error" in answers[2].text
        health = await client.get("/health")
        assert health.status_code == 503 and "a defect" in health.json()["error"]["message"]
        refused = await client.post("/v1/completions", json=BODY)
        assert refused.status_code == 503 and refused.json()["error"]["code"] == "engine_stopped"
        server = Server(ServerOptions(), "builtin")
        server.started(engine)
        process = Process(make_app(server), server)
        await asyncio.wait_for(watch_engine(process, server), HANG)
        assert process.should_exit and "a defect" in str(process.failure)

    ask(engine, task)


def test_every_address_of_the_host_is_listened_on(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """localhost has two, of which clients ask either; one that this machine lacks is left out."""

    def found(*_: Any, **__: Any) -> list[Any]:
        hosts = ("192.0.2.1", "127.0.0.1", "127.0.0.2", "127.0.0.1")
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (host, 0)) for host in hosts]

    monkeypatch.setattr("outrider.serve.listening.getaddrinfo", found)
    options = ServerOptions(port=0)
    sockets: Any = Process(make_app(Server(options, "builtin")), Server(options, "builtin"))._listening()
    assert [each.getsockname()[0] for each in sockets] == ["127.0.0.1", "127.0.0.2"]
    process: Any = SimpleNamespace(
        started=True, servers=[SimpleNamespace(sockets=[each]) for each in sockets]
    )
    with caplog.at_level(logging.INFO, "outrider.serve"), ExitStack() as opened:
        for each in sockets:
            opened.enter_context(each)
        asyncio.run(log_address(process, options, "builtin"))
    assert [record.args[2] for record in caplog.records] == ["127.0.0.1", "127.0.0.2"]  # type: ignore[index]
