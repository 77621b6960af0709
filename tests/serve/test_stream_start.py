"""Streams that fail before their first token: the answer has the status of the error."""

from __future__ import annotations

import asyncio
import itertools
import shutil
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from patience import HANG
from served import Served
from test_adapters import adapter_in
from torch import Tensor

from outrider import AsyncLLM, RequestError
from outrider.sampling.grammar.state import GrammarState
from outrider.serve.app import make_app
from outrider.serve.options import ServerOptions
from outrider.serve.state import Server

ROUTES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "The future of AI is", "max_tokens": 30, "ignore_eos": True},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 30},
    "/v1/responses": {"input": "Hello", "max_output_tokens": 30},
}
routes = pytest.mark.parametrize("path", ROUTES)


@pytest.fixture(scope="module")
def engine() -> Iterator[AsyncLLM]:
    made = AsyncLLM("builtin", max_model_len=256, max_num_seqs=4, restart_on_error=True)
    yield made
    made.shutdown()


def ask(engine: AsyncLLM, task: Callable[[httpx.AsyncClient], Awaitable[None]], **options: Any) -> None:
    """Run a task with a client of a new server on the engine, in which it leaves nothing."""

    async def run() -> None:
        server = Server(ServerOptions(**options), "builtin")
        server.started(engine)
        transport = httpx.ASGITransport(make_app(server))
        async with httpx.AsyncClient(transport=transport, base_url="http://test", timeout=HANG) as client:
            await task(client)
        assert server.open == 0
        async with asyncio.timeout(HANG):
            while engine.llm.loop.tickets:
                await asyncio.sleep(0.001)

    asyncio.run(run())


def refused(answer: httpx.Response, status: int) -> dict[str, Any]:
    assert (answer.status_code, answer.headers["content-type"]) == (status, "application/json"), answer.text
    error: dict[str, Any] = answer.json()["error"]
    return error


@routes
def test_an_id_that_is_taken(path: str, engine: AsyncLLM) -> None:
    async def task(client: httpx.AsyncClient) -> None:
        body = {**ROUTES[path], "request_id": "taken"}
        with engine.llm.engine.turn.lock:  # no step begins
            first = asyncio.create_task(client.post(path, json=body))
            while not engine.llm.loop.tickets:
                await asyncio.sleep(0.001)
            for stream in (False, True):
                error = refused(await client.post(path, json={**body, "stream": stream}), 400)
                assert error["param"] == "request_id" and "taken" in error["message"]
        assert (await first).status_code == 200

    ask(engine, task)


@routes
def test_a_failed_step_before_the_stream_is_a_503(
    path: str, engine: AsyncLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        monkeypatch.undo()
        raise ZeroDivisionError("a defect")

    async def task(client: httpx.AsyncClient) -> None:
        monkeypatch.setattr(engine.llm.engine.runner, "begin", fail)
        answer = await client.post(path, json={**ROUTES[path], "stream": True})
        assert refused(answer, 503)["code"] == "engine_error" and "Retry-After" in answer.headers
        assert (await client.post(path, json={**ROUTES[path], "stream": True})).status_code == 200

    ask(engine, task)


@routes
def test_a_request_that_waits_too_long(path: str, engine: AsyncLLM) -> None:
    async def task(client: httpx.AsyncClient) -> None:
        with engine.llm.engine.turn.lock:  # no step begins
            answer = await client.post(path, json={**ROUTES[path], "stream": True})
        assert refused(answer, 504)["code"] == "timeout"

    ask(engine, task, request_timeout=0.05)


def test_a_request_that_forbids_every_token(engine: AsyncLLM) -> None:
    async def task(client: httpx.AsyncClient) -> None:
        given = {"allowed_token_ids": [5], "structured_outputs": {"choice": ["yes"]}}
        for stream in (False, True):
            body = {**ROUTES["/v1/completions"], **given, "stream": stream}
            assert "every token" in refused(await client.post("/v1/completions", json=body), 400)["message"]

    ask(engine, task)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses"])
def test_a_later_error_names_the_field_in_its_event(
    path: str, engine: AsyncLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    mask, calls = GrammarState._mask, itertools.count()

    def fail(self: GrammarState, allowed: bytes) -> Tensor:
        if next(calls) < 8:
            return mask(self, allowed)
        raise RequestError("structured_outputs: too complex.", "structured_outputs")

    async def task(client: httpx.AsyncClient) -> None:
        monkeypatch.setattr(GrammarState, "_mask", fail)
        form = {"type": "json_object"}
        forms = {
            "/v1/chat/completions": ("response_format", form),
            "/v1/responses": ("text", {"format": form}),
        }
        name, value = forms[path]
        answer = await client.post(path, json={**ROUTES[path], name: value, "stream": True})
        field = "text.format" if name == "text" else name
        assert answer.status_code == 200 and f'"param":"{field}"' in answer.text, answer.text

    ask(engine, task, stream_interval=0.0)


def test_an_adapter_whose_weights_are_gone(open_server: Served, tmp_path: Path) -> None:
    path = adapter_in(tmp_path)
    place = {"lora_name": "gone", "lora_path": path}
    assert open_server.post("/v1/load_lora_adapter", place).status_code == 200
    shutil.rmtree(path)
    for stream in (False, True):
        body = {"model": "gone", "prompt": "a", "stream": stream}
        error = refused(open_server.post("/v1/completions", body), 400)
        assert error["param"] == "model" and "gone" in error["message"]
    assert open_server.post("/v1/unload_lora_adapter", {"lora_name": "gone"}).status_code == 200
