"""Outputs of AsyncLLM in time: which states of a request its reader gets."""

from __future__ import annotations

import asyncio
import itertools
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from async_requests import PROMPTS, params_of, running
from patience import HANG, Gate

from outrider import AsyncLLM, async_llm
from outrider.core.row import Row
from outrider.news import Inbox, NewsReader, wake


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


def test_statistics_are_made_for_the_last_output_of_an_interval_only(
    engine: AsyncLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They took most of the time between two steps, for states that no reader got."""
    made = list[int]()
    stats = Row.stats.fget
    monkeypatch.setattr(Row, "stats", property(lambda row: made.append(len(row.arrivals)) or stats(row)))

    async def last(interval: float) -> Any:
        made.clear()
        request = await engine.read(PROMPTS[0], params_of(0, max_tokens=60))
        async for _, output in engine.follow([request], interval=interval):
            assert interval or output.outputs[0].speculation.steps
        return output.outputs[0]

    async def task() -> None:
        whole, brief = await last(0), await last(1e6)
        assert set(made) == {60}
        assert brief.speculation == whole.speculation and brief.speculation.steps
        assert brief.drafted_by == whole.drafted_by and brief.last_draft is not None

    running(engine, task)


def test_the_crowd_is_the_number_of_running_samples(
    engine: AsyncLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(async_llm, "CROWD", 1)
    crowds = list[int]()

    async def read(i: int) -> None:
        async for _ in engine.generate(PROMPTS[i], params_of(i, max_tokens=100)):
            crowds.append(engine._crowd())

    async def task() -> None:
        assert engine._crowd() == 1
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
    wait, gate = Inbox.wait, Gate(4)

    async def late(inbox: Inbox) -> list[NewsReader]:
        news = await wait(inbox)
        first = next((reader for reader in news if reader.index == 0), None)
        gate.opened.set()
        while first is not None and None in [state.finish_reason for state in first.states]:
            time.sleep(0.001)  # the event loop does nothing else
        return news

    async def task() -> None:
        monkeypatch.setattr(Inbox, "wait", late)
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


class FakeLoop:
    """An event loop with a clock of its own.  timers: when, and what."""

    def __init__(self) -> None:
        self.now, self.timers = 0.0, list[tuple[float, Callable[[], None]]]()

    def time(self) -> float:
        return self.now

    def call_at(self, when: float, call: Callable[..., None], *given: Any) -> None:
        self.timers.append((when, partial(call, *given)))

    def call_soon(self, call: Callable[..., None], *given: Any) -> None:
        self.call_at(self.now, call, *given)

    def go_to(self, moment: float) -> None:
        while due := [timer for timer in self.timers if timer[0] <= moment]:
            first = min(due, key=lambda timer: timer[0])
            self.timers.remove(first)
            self.now = first[0]
            first[1]()
        self.now = moment


class Told:
    """A reader whose request has news when a test says so.  at: moments at which its task was woken."""

    def __init__(self, interval: float, crowd: Callable[[], int] = lambda: 1) -> None:
        self.loop, self.at = FakeLoop(), list[float]()
        self.output = SimpleNamespace(outputs=[SimpleNamespace(text="text")])
        request: Any = SimpleNamespace(finished=False, detokenizes=True, states=self.states)
        request.extended = lambda states: self.output
        inbox: Any = SimpleNamespace(loop=self.loop, add=lambda reader: self.at.append(self.loop.now))
        self.request = request
        self.reader = NewsReader(inbox, 0, request, interval=interval, crowd=crowd)

    def states(self, brief: bool = False) -> list[Any]:
        return [SimpleNamespace(finish_reason="stop" if self.request.finished else None)]

    def note(self) -> bool:
        """A step has added to the request.  Returns whether the event loop was called, which it is here."""
        called = self.reader.note()
        if called:
            wake([self.reader])
        return called


def test_a_crowd_makes_the_interval_longer() -> None:
    crowd = 1
    told = Told(0.5, lambda: crowd)
    for moment, now in [(0.0, 1), (0.25, 1), (0.5, 1), (0.75, 1), (0.9, 3), (1.0, 3), (1.25, 3), (2.0, 3)]:
        told.loop.go_to(moment)
        crowd = now
        told.note()
    told.loop.go_to(4.0)
    assert told.at == [0.0, 0.5, 1.0, 1.5, 3.0]


def test_a_step_within_the_interval_does_not_call_the_event_loop() -> None:
    told, called = Told(0.5), list[bool]()
    for step in range(40):
        told.loop.go_to(step / 32)
        called.append(told.note())
    assert told.at == [0.0, 0.5, 1.0] and called == [True] + [False] * 39
    told.request.finished = True
    assert told.note() and told.at[3:] == [39 / 32], "the last output is not held back"
    told.loop.go_to(9.0)
    assert len(told.at) == 4 and not told.loop.timers


def test_news_after_an_interval_without_any_come_at_once() -> None:
    told = Told(0.5)
    assert told.note()
    told.loop.go_to(5.1)
    assert not told.loop.timers
    assert told.note() and told.at == [0.0, 5.1]
    told.loop.go_to(5.3)
    assert not told.note()
    told.loop.go_to(6.0)
    assert told.at == [0.0, 5.1, 5.5]


def test_an_output_without_text_begins_no_interval() -> None:
    told = Told(0.5)
    told.output.outputs[0].text = ""
    assert told.note()
    told.reader.output()
    told.loop.go_to(0.1)
    assert told.note()
    told.output.outputs[0].text = "text"
    told.reader.output()
    for moment in (0.2, 0.6):
        told.loop.go_to(moment)
        assert not told.note()
    told.loop.go_to(2.0)
    assert told.at == [0.0, 0.1, 0.5, 1.0], "and the timer of the first one does not count"


class Interrupted(NewsReader):
    """A reader of which a step notes news before or after the event loop sets the attribute `where`."""

    where, before, ends = "", False, False
    noted: bool | None = None  # what that returned

    def __setattr__(self, name: str, value: Any) -> None:
        if name != self.where:
            super().__setattr__(name, value)
            return
        self.where = ""
        self.request.finished = self.ends  # type: ignore[misc]
        if self.before:
            self.noted = self.note()
        super().__setattr__(name, value)
        if not self.before:
            self.noted = self.note()


@pytest.mark.parametrize("ends", [False, True])
@pytest.mark.parametrize("interval", [0.0, 0.5])
@pytest.mark.parametrize("fresh", [False, True])
@pytest.mark.parametrize("before", [False, True])
@pytest.mark.parametrize("where", ["fresh", "called", "due"])
def test_news_that_come_while_the_event_loop_looks_are_told(
    where: str, before: bool, fresh: bool, interval: float, ends: bool
) -> None:
    told, count, seen = Told(interval), itertools.count(), list[int]()
    inbox: Any = told.reader.inbox
    inbox.add = lambda reader: told.loop.call_soon(lambda: seen.append(reader.shown[0].number))
    told.request.states = lambda brief: [SimpleNamespace(number=next(count), **vars(told.states()[0]))]
    reader = Interrupted(inbox, 0, told.request, interval=interval)
    if fresh:
        reader.note()
    else:
        reader.called = True  # as after an interval
    reader.where, reader.before, reader.ends = where, before, ends
    wake([reader])
    reader.where = ""
    if reader.noted:
        wake([reader])
    told.loop.go_to(1.0)
    assert reader.told == told.request.finished, "its end is told as such"
    if reader.noted is not None:
        assert seen[-1] == next(count) - 1, "the newest state"
    assert told.request.finished or reader.note() or told.loop.timers, "and later ones are told, too"


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
