"""What one replica has, all have: adapters and restarts also reach those that were lost for a while."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import quote

import httpx
import pytest
from patience import HANG
from starlette.testclient import TestClient

from outrider.errors import ConfigError, EngineError
from outrider.serve.errors import ApiError
from outrider.serve.options import ServerOptions
from outrider.serve.replicas.app import make_app
from outrider.serve.replicas.relay import NotReached, Question
from outrider.serve.replicas.replica import Replica
from outrider.serve.replicas.router import LOADING, UNLOADING, Router
from outrider.serve.replicas.run import run_replicas
from outrider.serve.run import Service


class Fake:
    """A replica that loads every adapter but "bad", and loses its connection if torn."""

    def __init__(self, number: int) -> None:
        self.number, self.state, self.torn = number, "ready", False
        self.adapters, self.has = dict[str, Question](), list[str]()

    @asynccontextmanager
    async def ask(self, question: Question) -> AsyncGenerator[Any]:
        name = json.loads(question.body)["lora_name"]
        if self.torn:
            self.state, self.torn = "lost", False
            raise NotReached
        if question.target == UNLOADING:
            self.has.remove(name)
        elif name != "bad" or self.number == 0:
            self.has.append(name)
        status = 400 if name == "bad" and self.number else 200
        yield SimpleNamespace(status=status, read=lambda: asyncio.sleep(0, b"{}"))


@pytest.fixture
def router(tmp_path: Path) -> Router:
    made = Router(Service(ServerOptions(replicas=2), {"model": "m", "device": "cpu"}), tmp_path)
    made.replicas = [Fake(0), Fake(1)]  # type: ignore[list-item]
    return made


def load(router: Router, name: str, target: str = LOADING) -> int:
    question = Question.of("POST", target, [], json.dumps({"lora_name": name}).encode())
    answer, _ = asyncio.run(router.everywhere(question, name))
    return answer.status


def has(router: Router) -> list[list[str]]:
    return [replica.has for replica in router.replicas]  # type: ignore[attr-defined]


@pytest.mark.parametrize("fate", ["lost", "torn"])
def test_a_replica_that_comes_back_gets_what_was_loaded_and_unloaded_meanwhile(
    fate: str, router: Router
) -> None:
    assert load(router, "old") == 200 and has(router) == [["old"], ["old"]]
    away = router.replicas[1]
    if fate == "lost":
        away.state = fate
    else:
        away.torn = True  # type: ignore[attr-defined]
    assert load(router, "new") == load(router, "old", UNLOADING) == 200
    assert has(router) == [["new"], ["old"]] and away.state == "lost"
    assert asyncio.run(router._prepare(away)) and has(router) == [["new"], ["new"]]


def test_what_one_replica_refuses_none_has(router: Router) -> None:
    assert load(router, "bad") == 400 and has(router) == [[], []]


def test_without_a_ready_replica_nothing_is_loaded(router: Router) -> None:
    for replica in router.replicas:
        replica.state = "lost"
    with pytest.raises(ApiError, match="no replica is ready"):
        load(router, "new")
    assert asyncio.run(router._prepare(router.replicas[0])) and has(router) == [[], []]


def lone(path: Path, prepare: Callable[[Replica], Awaitable[bool]] | None = None) -> Replica:
    """A replica without a process."""

    async def prepared(_: Replica) -> bool:
        return True

    service = Service(ServerOptions(), {"model": "m"}, socket=str(path / "0"))
    return Replica(service, 1.0, prepare or prepared, asyncio.Event())


@pytest.mark.parametrize("state", ["ready", "lost", "starting"])
def test_a_restart_reaches_a_replica_that_starts_or_whose_connection_broke(
    state: str, tmp_path: Path
) -> None:
    ended = list[str]()

    async def run() -> None:
        replica = lone(tmp_path)
        process: Any = SimpleNamespace(is_alive=lambda: True, terminate=lambda: ended.append(replica.state))
        replica._process, replica.state = process, state
        replica._started.set()  # by an earlier process
        task = asyncio.create_task(replica.restart())
        await asyncio.sleep(0)
        assert not task.done()
        replica._started.set()
        await task

    asyncio.run(run())
    assert ended == ["stopping"]


@pytest.mark.parametrize("process", [None, SimpleNamespace(is_alive=lambda: False)], ids=["none", "ended"])
def test_a_restart_waits_for_a_replica_that_is_about_to_start(process: Any, tmp_path: Path) -> None:
    async def run() -> None:
        replica = lone(tmp_path)
        replica._process, replica.state = process, "lost"
        replica._started.set()  # its process has failed
        task = asyncio.create_task(replica.restart())
        await asyncio.sleep(0)
        assert not task.done() and replica.state == "lost"
        replica._started.set()
        await task

    asyncio.run(run())


def test_a_first_process_that_is_stopped_while_it_starts_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    states = iter(["stopping", "starting"])

    async def one(replica: Replica) -> None:
        replica.state = next(states)

    monkeypatch.setattr(Replica, "_run_process", one)
    with pytest.raises(EngineError, match="did not start"):  # of the second one
        asyncio.run(lone(tmp_path).run())
    assert [*states] == []


def test_a_replica_that_is_stopped_while_it_starts_gets_no_requests(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def run() -> None:
        replica = lone(tmp_path)

        async def well(*_: object) -> bool:
            replica.state = "stopping"  # stopped while it answers
            return True

        monkeypatch.setattr(Replica, "_healthy", well)
        monkeypatch.setattr(Replica, "_measure", well)
        watch = asyncio.create_task(replica._watch(SimpleNamespace(pid=1), []))  # type: ignore[arg-type]
        await asyncio.sleep(0.05)
        assert replica.state == "stopping" and not replica._started.is_set()
        watch.cancel()

    asyncio.run(run())


def test_a_replica_is_prepared_again_before_it_is_ready_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = list[str]()

    async def run() -> None:
        async def prepare(one: Replica) -> bool:
            seen.append(one.state)
            return len(seen) != 2  # it is lost again

        async def well(*_: object) -> bool:
            return True

        replica = lone(tmp_path, prepare)
        monkeypatch.setattr(Replica, "_healthy", well)
        monkeypatch.setattr(Replica, "_measure", well)
        monkeypatch.setattr("outrider.serve.replicas.replica.BEAT", 0.01)
        watch = asyncio.create_task(replica._watch(SimpleNamespace(pid=1), []))  # type: ignore[arg-type]
        await replica._started.wait()
        replica.lose()
        async with asyncio.timeout(HANG):
            while replica.state != "ready":
                await asyncio.sleep(0)
        watch.cancel()

    asyncio.run(run())
    assert seen == ["starting", "lost", "lost"]


# ---- what a client sends, as a replica gets it


@pytest.fixture
def passed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[TestClient, list[httpx.Request]]:
    """A client of a router, and the requests that its only replica gets."""
    got = list[httpx.Request]()

    def answer(request: httpx.Request) -> httpx.Response:
        got.append(request)
        return httpx.Response(200, json={})

    options = ServerOptions(root_path="/llm", api_key=("secret",))
    router = Router(Service(options, {"model": "m", "device": "cpu"}), tmp_path)
    router.status = router.replicas[0].state = "ready"
    transport = httpx.MockTransport(answer)
    router.replicas[0]._client = httpx.AsyncClient(transport=transport, base_url="http://replica/llm")
    return TestClient(make_app(router), raise_server_exceptions=False), got


KEY = {"Authorization": "Bearer secret"}


def status(client: TestClient, path: str, query: bytes = b"", *headers: tuple[bytes, bytes]) -> int:
    return answer(client, path, query, *headers)[0]


def answer(
    client: TestClient, path: str, query: bytes = b"", *headers: tuple[bytes, bytes]
) -> tuple[int, bytes]:
    """Status and body of GET for a decoded path.  Clients of Python encode paths and headers differently."""
    scope = {
        "type": "http",
        "http_version": "1.1",
        "method": "GET",
        "scheme": "http",
        "root_path": "",
        "path": path,
        "raw_path": quote(path).encode(),
        "query_string": query,
        "client": ("client", 1),
        "server": ("host", 80),
        "headers": [(b"host", b"host"), (b"authorization", b"Bearer secret"), *headers],
    }
    sent: list[Any] = []
    bodies = [{"type": "http.request", "body": b"", "more_body": False}]

    async def receive() -> dict[str, Any]:
        return bodies.pop() if bodies else await asyncio.Future()  # the client stays

    async def send(message: Any) -> None:
        sent.append(message)

    asyncio.run(client.app(scope, receive, send))  # type: ignore[arg-type]
    return sent[0]["status"], b"".join(message.get("body", b"") for message in sent)


@pytest.mark.parametrize("name", ["a%0d%0ab", "ÿþÃ©", "a?b#c%2e", "a b", "日本"])
def test_every_path_and_query_is_passed_on(name: str, passed: tuple[TestClient, list[httpx.Request]]) -> None:
    client, got = passed
    for root in ("", "/llm"):
        assert status(client, f"{root}/v1/models/{name}", b"a=%0a&b=%E9") == 200
    for request in got:
        assert request.url.raw_path.decode() == f"/llm/v1/models/{quote(name)}?a=%0a&b=%E9"


def test_headers_that_are_no_ascii_are_passed_on(passed: tuple[TestClient, list[httpx.Request]]) -> None:
    client, got = passed
    assert status(client, "/v1/models", b"", (b"x-name", b"Jos\xe9")) == 200
    assert (b"x-name", b"Jos\xe9") in [(name.lower(), value) for name, value in got[0].headers.raw]


@pytest.mark.parametrize(("path", "code"), [("/v1/models/" + "a" * 70_000, 414), ("/v1/models/a\r\nb", 404)])
def test_paths_that_are_too_long_or_of_several_lines_are_refused(
    path: str, code: int, passed: tuple[TestClient, list[httpx.Request]]
) -> None:
    client, got = passed
    found, body = answer(client, path)
    assert found == code and not got
    assert json.loads(body)["error"]["code"] == str(code)


@pytest.mark.parametrize(("method", "path"), [("POST", "/"), ("PUT", "/static/x"), ("GET", "/v1/models")])
def test_bodies_that_no_route_reads_are_left_out(
    method: str, path: str, passed: tuple[TestClient, list[httpx.Request]]
) -> None:
    """They would be held in memory, without a key and a limit."""
    client, got = passed
    assert client.request(method, path, content=b"x" * 100_000, headers=KEY).status_code == 200
    assert got[0].content == b""


def test_replicas_that_would_learn_in_one_folder_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """All but the first loaded the model, and then ended: "another process learns in …: end it"."""
    monkeypatch.setattr("outrider.serve.replicas.run.Router", lambda *_: pytest.fail("replicas are started"))
    config = {"model": "head", "online": {"path": "learned"}}
    with pytest.raises(ConfigError, match="online: only one process learns"):
        run_replicas(Service(ServerOptions(replicas=2), {"model": "m", "device": "cpu"}, config))
