"""Failed and interrupted steps of a model that several threads use."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from typing import Any

import pytest
from helpers import answer
from patience import HANG, Gate
from threads import METHODS, PARAMS, PROMPTS, caller, config, params_of, together

from outrider import LLM, EngineError
from outrider.testing import check_idle


def failing(shared: LLM, error: BaseException, after: int = 4) -> Iterator[None]:
    """Let the `after`-th forward from now on raise; the thread that drives gets it."""
    forward, left = shared.engine.runner.begin, [after]

    def broken(*given: Any) -> Any:
        left[0] -= 1
        if left[0] == 0:
            raise error
        return forward(*given)

    shared.engine.runner.begin = broken  # type: ignore[method-assign]
    yield
    shared.engine.runner.begin = forward  # type: ignore[method-assign]


@pytest.mark.parametrize("method", METHODS)
def test_a_failed_step_ends_every_open_request(
    method: str, shared: LLM, texts: list[list[int]], llama: str
) -> None:
    shared.use(config(method, llama))
    ready, seen = threading.Barrier(3), []

    def run() -> None:
        ready.wait()
        try:
            shared.generate({"prompt_token_ids": PROMPTS[1]}, params_of(1, max_tokens=60))
        except (MemoryError, EngineError) as error:
            seen.append(error)

    broken = failing(shared, MemoryError("no room"), after=12)
    next(broken)
    together(run, run, run)
    next(broken, None)
    assert sum(isinstance(error, MemoryError) for error in seen) == 1 and len(seen) >= 1
    for error in seen:
        assert "no room" in str(error) and (isinstance(error, MemoryError) or error.__cause__ is not None)
    check_idle(shared)
    assert answer(shared, PROMPTS[0], PARAMS[0]).outputs[0].token_ids == texts[0]


def test_a_stream_ends_with_the_step_that_another_caller_drove(shared: LLM) -> None:
    shared.use(None)
    stream = shared.stream({"prompt_token_ids": PROMPTS[1]}, PARAMS[1])
    next(stream)
    broken = failing(shared, MemoryError("no room"), after=1)
    next(broken)
    with pytest.raises(MemoryError):
        shared.generate({"prompt_token_ids": PROMPTS[0]}, PARAMS[0])
    next(broken, None)
    with pytest.raises(EngineError, match="MemoryError: no room"):
        next(stream)
    check_idle(shared)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("part", ["begin", "observe", "_ends", "share"])
def test_an_interrupt_ends_the_requests_of_its_caller_only(
    part: str, method: str, shared: LLM, texts: list[list[int]], llama: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared.use(config(method, llama))
    owner = {"begin": shared.engine.runner, "observe": shared.engine.drafter}.get(
        part, shared.engine.scheduler
    )
    inner, calls = getattr(owner, part), []

    def interrupted(*given: Any) -> Any:
        calls.append(0)
        found = inner(*given) if part == "_ends" else None
        if len(calls) == 3:
            raise KeyboardInterrupt
        return found if part == "_ends" else inner(*given)

    stream = shared.stream([{"prompt_token_ids": PROMPTS[i]} for i in (1, 2)], [PARAMS[i] for i in (1, 2)])
    next(stream)
    with monkeypatch.context() as patch:
        patch.setattr(owner, part, interrupted)
        with pytest.raises(KeyboardInterrupt):
            shared.generate([{"prompt_token_ids": prompt} for prompt in PROMPTS], PARAMS)
    last = {output.request_id: output for output in stream}
    assert sorted(output.outputs[0].token_ids for output in last.values()) == sorted([texts[1], texts[2]])
    assert all(len(o.outputs[0].token_times) == len(o.outputs[0].token_ids) for o in last.values())
    check_idle(shared)


def test_an_interrupt_while_rows_enter_loses_none_of_another_caller(
    shared: LLM, texts: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C in the thread that drives, between two samples of a request that has just arrived."""
    shared.use(None)
    gate, add, calls, seen = Gate(2), shared.engine.add, [0], list[list[int]]()

    def interrupted(row: Any) -> None:
        calls[0] += 1
        if calls[0] == 2:
            raise KeyboardInterrupt
        add(row)

    def other() -> None:
        assert gate.reached.wait(HANG)
        monkeypatch.setattr(shared.engine, "add", interrupted)
        ticket = shared.enqueue({"prompt_token_ids": PROMPTS[1]}, params_of(1, n=3))[0]
        gate.opened.set()
        limit = time.monotonic() + 10
        shared.loop.run_until(lambda: ticket.finished or time.monotonic() > limit)
        seen.extend(row.output for row in ticket.rows)

    thread = threading.Thread(target=other, daemon=True)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        answer(shared, PROMPTS[0], params_of(0, max_tokens=40, logits_processors=[gate]))
    thread.join(HANG)
    assert seen[0] == texts[1] and len(seen[1]) == len(seen[2]) == len(texts[1])
    check_idle(shared)


def test_a_drafter_that_cannot_forget_a_request_keeps_none_open(
    shared: LLM, texts: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    shared.use({"method": "ngram"})
    stream = shared.stream([{"prompt_token_ids": PROMPTS[i]} for i in range(2)], PARAMS[:2])
    next(stream)
    forget = shared.engine.drafter.forget

    def broken(*given: Any) -> None:
        forget(*given)
        raise ZeroDivisionError("a defect")

    with monkeypatch.context() as patch:
        patch.setattr(shared.engine.drafter, "forget", broken)
        stream.close()
    check_idle(shared)
    assert answer(shared, PROMPTS[0], PARAMS[0]).outputs[0].token_ids == texts[0]


@pytest.mark.skipif(not hasattr(signal, "SIGUSR1"), reason="needs signals")
@pytest.mark.parametrize("method", METHODS)
def test_interrupts_at_any_moment(method: str, shared: LLM, texts: list[list[int]], llama: str) -> None:
    """Ctrl-C in the main thread, wherever it is just then, while other threads are answered."""
    shared.use(config(method, llama))
    rng, over, armed, interrupts = random.Random(3), threading.Event(), [False], [0]
    wrong: list[BaseException] = []

    def interrupt(*_: Any) -> None:
        if armed[0]:
            armed[0] = False
            interrupts[0] += 1
            raise KeyboardInterrupt

    def shoot() -> None:
        while not over.wait(rng.uniform(1e-4, 1e-2)):
            os.kill(os.getpid(), signal.SIGUSR1)

    def answered(seed: int) -> None:
        try:
            while not over.is_set():
                caller(shared, texts, seed, rounds=2)()
        except BaseException as error:
            wrong.append(error)

    before = signal.signal(signal.SIGUSR1, interrupt)
    shooter = threading.Thread(target=shoot, daemon=True)
    others = threading.Thread(target=together, args=[partial(answered, i) for i in range(2)], daemon=True)
    try:
        others.start()
        shooter.start()
        calls, limit = 0, time.monotonic() + HANG
        while (calls < 30 or interrupts[0] < 12) and time.monotonic() < limit:
            calls += 1
            with suppress(KeyboardInterrupt):
                armed[0] = True
                answer(shared, PROMPTS[1], params_of(1, max_tokens=100))
                armed[0] = False
    finally:
        armed[0] = False
        over.set()
        shooter.join(HANG)
        others.join(HANG)
        signal.signal(signal.SIGUSR1, before)
    assert not others.is_alive() and interrupts[0] > 3 and not wrong
    check_idle(shared)
    assert answer(shared, PROMPTS[0], PARAMS[0]).outputs[0].token_ids == texts[0]
