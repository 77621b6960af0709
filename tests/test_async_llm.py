"""Many asyncio tasks on one engine: the texts of LLM, and requests that end at once."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest
from async_requests import PROMPTS, params_of, running
from patience import HANG, Gate

from outrider import LLM, AsyncLLM, EngineError, RequestError, RequestOutput
from outrider.errors import RankError
from outrider.testing import EngineDriver


@pytest.fixture(scope="module")
def engine(tiny: Path) -> Iterator[AsyncLLM]:
    made = AsyncLLM(
        str(tiny), dtype="float32", seed=0, max_num_seqs=3, speculative_config={"method": "ngram"}
    )
    yield made
    made.shutdown()
    assert not made.is_running and threading.active_count() < 50


@pytest.fixture(scope="module")
def texts(tiny: Path) -> list[list[int]]:
    llm = LLM(str(tiny), dtype="float32", seed=0)
    outputs = llm.generate(PROMPTS, [params_of(i) for i in range(len(PROMPTS))])
    return [output.outputs[0].token_ids for output in outputs]


async def ids_of(engine: AsyncLLM, i: int) -> list[int]:
    ids: list[int] = []
    async for output in engine.generate(PROMPTS[i], params_of(i)):
        assert output.outputs[0].token_ids[: len(ids)] == ids
        ids = output.outputs[0].token_ids
    assert output.finished
    return ids


def test_tasks_share_a_batch_and_get_the_texts_of_llm(engine: AsyncLLM, texts: list[list[int]]) -> None:
    async def task() -> None:
        assert list(await asyncio.gather(*(ids_of(engine, i) for i in range(len(PROMPTS))))) == texts
        finals = await asyncio.gather(*(engine.complete(p, params_of(i)) for i, p in enumerate(PROMPTS)))
        assert [output.outputs[0].token_ids for output in finals] == texts

    running(engine, task)


def test_a_processor_that_waits_for_a_task_of_its_engine_fails(
    engine: AsyncLLM, texts: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The task gives up, and the processor gets its error; without that neither would end."""
    monkeypatch.setattr("outrider.engine.turn.STALL", 0.1)

    async def task() -> None:
        loop = asyncio.get_running_loop()

        def wait(ids: list[int], logits: Any) -> Any:
            if len(ids) == 2:
                asyncio.run_coroutine_threadsafe(engine.complete(PROMPTS[1], params_of(1)), loop).result()
            return logits

        with pytest.raises(RequestError, match="may wait for it"):
            await engine.complete(PROMPTS[0], params_of(0, logits_processors=[wait]))
        assert await ids_of(engine, 1) == texts[1]

    running(engine, task)


@pytest.mark.parametrize("how", ["abort", "close", "cancel"])
def test_an_ended_request_leaves_before_the_next_step(how: str, engine: AsyncLLM) -> None:
    gate = Gate(20)

    async def read(started: asyncio.Event) -> str | None:
        params = params_of(0, max_tokens=200, logits_processors=[gate])
        outputs = engine.generate(PROMPTS[0], params, "mine")
        async with aclosing(outputs):
            async for output in outputs:  # noqa: B007
                started.set()
                if how == "close":
                    assert await asyncio.to_thread(gate.reached.wait, HANG)
                    return None
        return output.outputs[0].finish_reason

    async def task() -> None:
        started = asyncio.Event()
        reader = asyncio.create_task(read(started))
        await started.wait()
        assert await asyncio.to_thread(gate.reached.wait, HANG)  # inside a step
        steps = engine.llm.engine.steps
        if how == "abort":
            await engine.abort("mine")
            gate.opened.set()
            assert await reader == "abort"
        elif how == "cancel":
            reader.cancel()
            with pytest.raises(asyncio.CancelledError):
                await reader
        else:
            await reader
        gate.opened.set()
        while engine.llm.loop.tickets:
            await asyncio.sleep(0)
        assert engine.llm.engine.steps <= steps + 1  # the one that was held

    running(engine, task)


def test_closing_an_ended_request_does_not_end_another_one_of_its_id(engine: AsyncLLM) -> None:
    """The later one was cut off if it came before the first had been closed."""

    async def task() -> None:
        first = engine.generate(PROMPTS[0], params_of(0, max_tokens=1), "same")
        while not (await anext(first)).finished:
            pass
        while engine.llm.loop.tickets:
            await asyncio.sleep(0)
        second = asyncio.create_task(engine.complete(PROMPTS[1], params_of(1, max_tokens=60), "same"))
        while "same" not in engine.llm.loop.tickets and not second.done():
            await asyncio.sleep(0)
        await first.aclose()
        assert len((await second).outputs[0].token_ids) == 60

    running(engine, task)


def test_an_extended_output_grows_and_its_copies_do_not(tiny: Path, texts: list[list[int]]) -> None:
    llm = LLM(str(tiny), dtype="float32", seed=0)
    driver, params = EngineDriver(llm), params_of(3, logprobs=2)
    request = driver.add_request(PROMPTS[3], params)
    copies, shared = list[RequestOutput](), list[RequestOutput]()
    while not request.finished:
        driver.step()
        shared.append(request.extended(request.states()))
        copies.append(shared[-1].copy())
    assert len({id(output) for output in shared}) == 1
    for count, copy in enumerate(copies, start=1):
        (sample,) = copy.outputs
        assert sample.token_ids == texts[3][:count] and sample.logprobs is not None
        assert len(sample.logprobs) == len(sample.token_sources) == count
    whole, grown = request.output().outputs[0], shared[0].outputs[0]
    assert (whole.token_ids, whole.logprobs) == (grown.token_ids, grown.logprobs)
    assert (whole.cumulative_logprob, whole.token_times) == (grown.cumulative_logprob, grown.token_times)


def test_the_end_is_reported_while_nothing_is_read(engine: AsyncLLM, texts: list[list[int]]) -> None:
    async def task() -> None:
        requests = [await engine.read(PROMPTS[i], params_of(i)) for i in (1, 2)]
        ended: dict[int, list[int]] = {}

        def end(i: int, output: RequestOutput) -> None:
            ended[i] = output.outputs[0].token_ids

        async with aclosing(engine.follow(requests, on_end=end)) as outputs:
            await anext(outputs)
            while len(ended) < 2:
                await asyncio.sleep(0.001)
            assert ended == {0: texts[1], 1: texts[2]}

    running(engine, task)


def test_requests_end_after_their_time(engine: AsyncLLM) -> None:
    async def task() -> None:
        gate = Gate(20)
        request = await engine.read(PROMPTS[0], params_of(0, max_tokens=200, logits_processors=[gate]))
        with pytest.raises(TimeoutError):
            async for _ in engine.follow([request], timeout=0.01):
                pass
        gate.opened.set()

    running(engine, task)


def test_invalid_input_and_used_ids_are_refused(engine: AsyncLLM) -> None:
    async def task() -> None:
        with pytest.raises(RequestError, match="token id 999"):
            await engine.complete([999])
        with pytest.raises(RequestError, match="priority must be a whole number, got 'high'"):
            await engine.complete(PROMPTS[0], priority="high")  # type: ignore[arg-type]
        gate = Gate(20)
        params = params_of(0, max_tokens=200, logits_processors=[gate])
        outputs = engine.generate(PROMPTS[0], params, "same")
        async with aclosing(outputs):
            await anext(outputs)
            with pytest.raises(RequestError, match="'same'"):
                await engine.complete(PROMPTS[0], params_of(0), "same")
            gate.opened.set()
            async for output in outputs:  # noqa: B007
                pass
            assert len(output.outputs[0].token_ids) == 200, "the first one goes on"

    running(engine, task)


def test_a_smaller_priority_comes_first(engine: AsyncLLM) -> None:
    async def task() -> None:
        ended: list[int] = []

        async def one(priority: int) -> None:
            params = params_of(2, max_tokens=20)
            await engine.complete(PROMPTS[2], params, priority=priority)
            ended.append(priority)

        priorities = [-1, 5, 4, 3, 2, 1, 0]
        with engine.llm.engine.turn.lock:  # no step runs
            tasks = []
            for priority in priorities:
                tasks.append(asyncio.create_task(one(priority)))
                # the first one is in the step before the others arrive
                while len(engine.llm.loop.tickets) < len(tasks) or (
                    len(tasks) == 1 and engine.llm.loop._arriving
                ):
                    await asyncio.sleep(0)
        await asyncio.gather(*tasks)
        assert sorted(ended[:3]) == [-1, 0, 1] and sorted(ended[3:6]) == [2, 3, 4]

    running(engine, task)


def failing(engine: AsyncLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the next step fail."""

    def fail(*_: object) -> None:
        monkeypatch.undo()
        raise ZeroDivisionError("a defect")

    monkeypatch.setattr(engine.llm.engine.runner, "begin", fail)


def test_a_failed_step_ends_its_requests_and_the_engine_restarts(
    engine: AsyncLLM, texts: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def task() -> None:
        engine.restart_on_error = True
        failing(engine, monkeypatch)
        for result in await asyncio.gather(*(ids_of(engine, i) for i in range(3)), return_exceptions=True):
            assert isinstance(result, EngineError) or result in texts
        assert engine.restarts and engine.is_running
        assert await ids_of(engine, 0) == texts[0]

    running(engine, task)


def test_a_failed_step_stops_an_engine_that_must_not_restart(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = AsyncLLM(str(tiny), dtype="float32")

    async def task() -> None:
        await own.check_health()
        failing(own, monkeypatch)
        results = await asyncio.gather(*(ids_of(own, i) for i in range(5)), return_exceptions=True)
        assert all(isinstance(result, EngineError) for result in results)
        for _ in range(3):
            with pytest.raises(EngineError, match="ZeroDivisionError: a defect") as raised:
                await own.check_health()
            assert len(raised.traceback) == 2  # of this call alone
        with pytest.raises(EngineError, match="a defect"):
            await own.complete(PROMPTS[0])

    running(own, task)


def test_an_engine_whose_thread_ends_leaves_no_task_waiting(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = AsyncLLM(str(tiny), dtype="float32", restart_on_error=True)

    async def task() -> None:
        def leave(*_: object) -> None:
            raise SystemExit

        monkeypatch.setattr(own.llm.engine.runner, "begin", leave)
        results = await asyncio.gather(*(ids_of(own, i) for i in range(3)), return_exceptions=True)
        assert all(isinstance(result, EngineError) for result in results)
        assert not own.is_running and not own.restarts

    running(own, task)


def test_shutdown_ends_open_requests(tiny: Path) -> None:
    own = AsyncLLM(str(tiny), dtype="float32")

    async def task() -> None:
        gate = Gate(20)
        params = params_of(0, max_tokens=200, logits_processors=[gate])
        readers = [asyncio.create_task(own.complete(prompt, params)) for prompt in PROMPTS]
        while len(own.llm.loop.tickets) < len(PROMPTS):
            await asyncio.sleep(0)
        ending = asyncio.create_task(asyncio.to_thread(own.shutdown, HANG))
        while not own._closed:
            await asyncio.sleep(0)
        gate.opened.set()
        await ending
        results = await asyncio.gather(*readers, return_exceptions=True)
        assert all(isinstance(result, EngineError) for result in results)

    running(own, task)


def test_a_lost_rank_stops_an_engine_without_requests(
    engine: AsyncLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert engine.is_running
    monkeypatch.setattr(type(engine.llm.engine.decoder), "failure", RankError("rank 1 has ended"))
    assert not engine.is_running
    with pytest.raises(RankError, match="rank 1"):
        asyncio.run(engine.check_health())
    monkeypatch.undo()
    assert engine.is_running
