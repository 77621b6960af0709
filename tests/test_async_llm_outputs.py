"""Outputs of AsyncLLM in time: which states of a request its reader gets."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from async_requests import PROMPTS, params_of, running
from patience import HANG, Gate

from outrider import AsyncLLM, async_llm


@pytest.fixture(scope="module")
def engine(tiny: Path) -> Iterator[AsyncLLM]:
    made = AsyncLLM(
        str(tiny), dtype="float32", seed=0, max_num_seqs=3, speculative_config={"method": "ngram"}
    )
    yield made
    made.shutdown()
    assert not made.is_running and threading.active_count() < 50


def test_an_interval_leaves_the_first_output_and_the_last(engine: AsyncLLM) -> None:
    async def lengths(interval: float, *processors: Any) -> list[int]:
        params = params_of(0, max_tokens=60, logits_processors=[*processors])
        request = await engine.read(PROMPTS[0], params)
        found = list[int]()
        async for _, output in engine.follow([request], interval=interval):
            found.append(len(output.outputs[0].token_ids))
            for gate in processors:
                if found[-1] > gate.at - 20:
                    gate.opened.set()
        assert found[-1] == 60
        return found

    async def task() -> None:
        assert len(await lengths(1e6)) <= 2
        # Each part is read before the request gets to the next gate, however slow this thread is.
        assert len(await lengths(0, Gate(20), Gate(40))) > 2

    running(engine, task)


def test_the_crowd_is_the_number_of_running_samples(
    engine: AsyncLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    crowds, wake = list[int](), async_llm._wake
    monkeypatch.setattr(async_llm, "CROWD", 1)

    def noted(readers: Any, crowd: int) -> None:
        crowds.append(crowd)
        wake(readers, crowd)

    monkeypatch.setattr(async_llm, "_wake", noted)

    async def read(i: int) -> None:
        async for _ in engine.generate(PROMPTS[i], params_of(i, max_tokens=100)):
            pass

    async def task() -> None:
        with engine.llm.engine.turn.lock:  # no step runs
            tasks = [asyncio.create_task(read(i)) for i in range(3)]
            while len(engine.llm.loop.tickets) < 3:
                await asyncio.sleep(0)
        await asyncio.gather(*tasks)
        assert max(crowds) == 3

    running(engine, task)


def test_an_end_between_waking_and_reading_is_reported_once(
    engine: AsyncLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A task that is woken for the first tokens of a request reads them when the request has ended."""
    wait, gate = async_llm._Inbox.wait, Gate(4)

    async def late(inbox: async_llm._Inbox) -> list[async_llm._Reader]:
        news = await wait(inbox)
        first = next((reader for reader in news if reader.index == 0), None)
        gate.opened.set()
        while first is not None and None in [state.finish_reason for state in first.states]:
            time.sleep(0.001)  # the event loop does nothing else
        return news

    async def task() -> None:
        monkeypatch.setattr(async_llm._Inbox, "wait", late)
        given = params_of(0, logits_processors=[gate]), params_of(1, max_tokens=150)
        requests = [await engine.read(PROMPTS[i], given[i]) for i in range(2)]
        finished, ended = list[int](), list[int]()
        outputs = engine.follow(requests, on_end=lambda i, _: ended.append(i))
        async with asyncio.timeout(10):
            async for i, output in outputs:
                if output.finished:
                    finished.append(i)
            await asyncio.sleep(0)  # for a call that is scheduled
        assert sorted(finished) == sorted(ended) == [0, 1]

    running(engine, task)


def test_a_crowd_makes_the_interval_longer() -> None:
    now, timers = [0.0], list[float]()

    def call_at(when: float, *_: Any) -> Any:
        timers.append(when)
        return SimpleNamespace(cancel=lambda: None)

    loop = SimpleNamespace(time=lambda: now[0], call_at=call_at)
    inbox: Any = SimpleNamespace(loop=loop, news={}, event=SimpleNamespace(set=lambda: None))
    reader = async_llm._Reader(inbox, 0, SimpleNamespace(), False, 0.5, None)  # type: ignore[arg-type]
    reader.states, woken = [SimpleNamespace(finish_reason=None)], list[float]()  # type: ignore[list-item]
    for moment, crowd in [(0.0, 1), (0.25, 1), (0.5, 1), (1.0, 3), (1.25, 3), (1.5, 3), (2.75, 3), (3.0, 3)]:
        now[0] = moment
        async_llm._wake([reader], crowd)
        if inbox.news:
            woken.append(moment)
            inbox.news.clear()
    assert woken == [0.0, 0.5, 1.0, 1.5, 3.0] and timers == [0.5, 1.5, 3.0]


def test_an_interval_begins_with_the_first_text() -> None:
    engine = AsyncLLM("builtin", max_model_len=256, max_num_seqs=4, speculative_config="off")
    end = engine.llm.tokenizer.eos_token_id

    def end_first(ids: list[int], logits: Any) -> Any:
        if not ids:
            logits[end] = 1e4
        return logits

    async def task() -> None:
        params = params_of(0, max_tokens=60, logits_processors=[end_first], ignore_eos=True)
        request = await engine.read(PROMPTS[0], params)
        texts = [output.outputs[0].text async for _, output in engine.follow([request], interval=1e6)]
        assert request.rows[0].tokens[request.rows[0].prompt] == end
        assert any(texts[:-1])

    running(engine, task)
    engine.shutdown()


def test_tokens_that_exist_are_not_held_back_by_a_long_step(engine: AsyncLLM) -> None:
    read, came = threading.Event(), list[bool]()

    def wait(ids: list[int], logits: Any) -> Any:
        if len(ids) == 6:
            came.append(read.wait(HANG))
        return logits

    async def task() -> None:
        params = params_of(0, max_tokens=10, logits_processors=[wait])
        request = await engine.read(PROMPTS[0], params)
        async for _, output in engine.follow([request], interval=0.2):
            if len(output.outputs[0].token_ids) >= 3:
                read.set()
        assert came and all(came)

    running(engine, task)


def test_a_slow_reader_gets_the_newest_output_only(engine: AsyncLLM) -> None:
    async def task() -> None:
        counts = []
        async for output in engine.generate(PROMPTS[1], params_of(1, max_tokens=100)):
            counts.append(len(output.outputs[0].token_ids))
            if len(counts) == 1:
                while engine.llm.loop.tickets:
                    await asyncio.sleep(0.001)
        assert counts[-1] == 100 and len(counts) <= 3

    running(engine, task)
