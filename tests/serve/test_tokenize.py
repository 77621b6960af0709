"""/tokenize and /detokenize of long texts: generating requests are tokenized meanwhile."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import httpx
import pytest
from patience import HANG

from outrider import AsyncLLM
from outrider.progress import Request
from outrider.serve.app import make_app
from outrider.serve.options import ServerOptions
from outrider.serve.state import Server

LONG = "word " * 1000


@pytest.mark.parametrize("path", ["/tokenize", "/tokenize of messages", "/detokenize"])
def test_requests_are_read_while_a_long_text_is_tokenized(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = AsyncLLM("builtin", max_model_len=256)
    began, go_on = threading.Event(), threading.Event()
    kind = type(engine.llm.tokenizer)
    call = "encode" if path.startswith("/tokenize") else "decode"
    original = getattr(kind, call)

    def slow(self: Any, given: Any, *more: Any, **options: Any) -> Any:
        if len(given) >= 1000:
            began.set()
            assert go_on.wait(HANG)
        return original(self, given, *more, **options)

    monkeypatch.setattr(kind, call, slow)
    body: dict[str, Any] = {"prompt": LONG} if path == "/tokenize" else {"tokens": [300] * 1000}
    if path.endswith("messages"):
        body = {"messages": [{"role": "user", "content": LONG}]}

    async def run() -> None:
        server = Server(ServerOptions(), "builtin")
        server.started(engine)
        transport = httpx.ASGITransport(make_app(server))
        async with httpx.AsyncClient(transport=transport, base_url="http://test", timeout=60) as client:
            # more than there are threads for such work
            waiting = [asyncio.create_task(client.post(path.split()[0], json=body)) for _ in range(40)]
            try:
                assert await asyncio.to_thread(began.wait, HANG)
                async with asyncio.timeout(HANG):
                    short = await client.post("/v1/completions", json={"prompt": "One", "max_tokens": 1})
                assert short.status_code == 200 and not any(task.done() for task in waiting)
            finally:
                go_on.set()
            answers = await asyncio.gather(*waiting)
        expected = engine.llm.tokenizer.encode(LONG) if path == "/tokenize" else None
        assert {answer.status_code for answer in answers} == {200}
        assert expected is None or answers[0].json()["tokens"] == expected

    try:
        asyncio.run(run())
    finally:
        engine.shutdown()


def test_the_first_text_is_tokenized_while_others_are_read() -> None:
    engine = AsyncLLM("builtin", max_model_len=64)

    async def run() -> None:
        server = Server(ServerOptions(), "builtin")
        server.started(engine)
        transport = httpx.ASGITransport(make_app(server))
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            with server.reader.lock:
                async with asyncio.timeout(HANG):
                    answer = await client.post("/tokenize", json={"prompt": "One"})
        assert answer.json()["tokens"] == engine.llm.tokenizer.encode("One")

    try:
        asyncio.run(run())
    finally:
        engine.shutdown()


def test_a_completion_without_special_tokens_refuses_an_endless_prompt_early(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine, lengths = AsyncLLM("builtin", max_model_len=64), list[int]()
    kind = type(engine.llm.tokenizer)
    original = kind.encode

    def noted(self: Any, text: str, *more: Any, **options: Any) -> Any:
        lengths.append(len(text))
        return original(self, text, *more, **options)

    monkeypatch.setattr(kind, "encode", noted)

    async def run() -> None:
        server = Server(ServerOptions(), "builtin")
        server.started(engine)
        transport = httpx.ASGITransport(make_app(server))
        async with httpx.AsyncClient(transport=transport, base_url="http://test", timeout=60) as client:
            body = {"prompt": "word " * 100_000, "add_special_tokens": False}
            answer = await client.post("/v1/completions", json=body)
        assert answer.status_code == 400 and "more than the 64 tokens" in answer.text

    try:
        asyncio.run(run())
    finally:
        engine.shutdown()
    assert max(lengths) < 10_000


def test_requests_that_are_read_count_as_queued(monkeypatch: pytest.MonkeyPatch) -> None:
    """A crowd with long prompts is refused before they are tokenized."""
    engine, body = AsyncLLM("builtin", max_model_len=64), {"prompt": "One", "max_tokens": 1}
    read, opened, waiting = engine.read, asyncio.Event(), list[Any]()

    async def slow(*given: Any) -> Request:
        waiting.append(given)
        await opened.wait()
        return await read(*given)

    monkeypatch.setattr(engine, "read", slow)

    async def run() -> None:
        server = Server(ServerOptions(max_requests=2), "builtin")
        server.started(engine)
        transport = httpx.ASGITransport(make_app(server))
        async with httpx.AsyncClient(transport=transport, base_url="http://test", timeout=60) as client:
            first = [asyncio.create_task(client.post("/v1/completions", json=body)) for _ in range(2)]
            while len(waiting) < 2:
                await asyncio.sleep(0.01)
            refused = await asyncio.wait_for(client.post("/v1/completions", json=body), HANG)
            assert refused.status_code == 429 and "Retry-After" in refused.headers
            opened.set()
            assert [(await answer).status_code for answer in first] == [200, 200]
        assert server.open == 0

    try:
        asyncio.run(run())
    finally:
        engine.shutdown()
