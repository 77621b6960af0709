"""Several threads on one model: every text is the one that a call alone gives, and nothing leaks."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from helpers import answer
from torch import Tensor

from outrider import LLM, ConfigError, EngineError, RequestError, SamplingParams
from outrider.core.row import Row
from outrider.engine.loop import EngineLoop
from outrider.errors import OutriderError
from outrider.testing import EngineDriver, check_idle, random_prompts

PROMPTS = random_prompts(12, seed=4)
METHODS = ["off", "ngram", "suffix", "draft_model"]


def params_of(i: int, **given: Any) -> SamplingParams:
    return SamplingParams(
        **{"temperature": 0.8 * (i % 3 > 0), "seed": i, "max_tokens": 8 + i % 9, "ignore_eos": True, **given}
    )


PARAMS = [params_of(i) for i in range(len(PROMPTS))]


def config(method: str, model: str) -> dict[str, Any]:
    return {"method": method, **({"model": model} if method == "draft_model" else {})}


@pytest.fixture(scope="module")
def llm(llama: str) -> LLM:
    return LLM(llama, dtype="float32", seed=0, max_num_seqs=5)


@pytest.fixture(scope="module")
def texts(llm: LLM) -> list[list[int]]:
    return [answer(llm, prompt, p).outputs[0].token_ids for prompt, p in zip(PROMPTS, PARAMS)]


def together(*tasks: Callable[[], None], limit: float = 120) -> None:
    """Run each task in a thread of its own; raise what one of them raised."""
    errors: list[BaseException] = []

    def guarded(task: Callable[[], None]) -> None:
        try:
            task()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(task,), daemon=True) for task in tasks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(limit)
    assert not any(thread.is_alive() for thread in threads), "a thread hangs"
    if errors:
        raise errors[0]


def caller(llm: LLM, texts: list[list[int]], seed: int, rounds: int = 6) -> Callable[[], None]:
    """Random calls of every kind, each compared with the text of a call alone."""

    def generate(rng: random.Random, i: int) -> None:
        picked = [i, *rng.sample(range(len(PROMPTS)), rng.randint(0, 2))]
        outputs = llm.generate(
            [{"prompt_token_ids": PROMPTS[j]} for j in picked], [PARAMS[j] for j in picked]
        )
        assert [output.outputs[0].token_ids for output in outputs] == [texts[j] for j in picked]

    def stream(rng: random.Random, i: int) -> None:
        stop, before = rng.choice([2, 1000]), 0
        for count, output in enumerate(llm.stream({"prompt_token_ids": PROMPTS[i]}, PARAMS[i])):
            ids = output.outputs[0].token_ids
            assert ids == texts[i][: len(ids)] and len(ids) >= before
            before = len(ids)
            assert not output.finished or ids == texts[i]
            if count == stop:
                break

    def aborted(rng: random.Random, i: int) -> None:
        for output in llm.stream({"prompt_token_ids": PROMPTS[i]}, PARAMS[i]):
            ids = output.outputs[0].token_ids
            assert ids == texts[i][: len(ids)]
            threading.Thread(target=llm.abort, args=(output.request_id,)).start()

    def run() -> None:
        rng = random.Random(seed)
        for _ in range(rounds):
            rng.choice([generate, generate, stream, aborted])(rng, rng.randrange(len(PROMPTS)))

    return run


@pytest.mark.parametrize("method", METHODS)
def test_texts_do_not_depend_on_other_threads(
    method: str, llm: LLM, texts: list[list[int]], llama: str
) -> None:
    llm.use(config(method, llama))
    together(*(caller(llm, texts, seed) for seed in range(6)))
    check_idle(llm)


def test_twins_in_two_threads_each(llm: LLM, texts: list[list[int]], llama: str) -> None:
    """Engines on the same weights share the scratch of the kernels."""
    twins = [llm.variant(config(method, llama)) for method in METHODS[1:]]
    together(*(caller(twin, texts, seed) for seed in range(2) for twin in twins))
    for twin in twins:
        check_idle(twin)


def test_twins_of_a_model_in_the_code_of_transformers(tmp_path: Path) -> None:
    """Their forwards go through one module, which holds state during a forward."""
    from outrider.testing import tiny_checkpoint

    llm = LLM(tiny_checkpoint(tmp_path, "GPTNeoX"), dtype="float32", seed=0)
    texts = [answer(llm, prompt, p).outputs[0].token_ids for prompt, p in zip(PROMPTS, PARAMS)]
    twins = [llm, llm.variant({"method": "ngram"})]
    together(*(caller(twin, texts, seed, rounds=3) for seed in range(2) for twin in twins))
    for twin in twins:
        check_idle(twin)


@pytest.mark.parametrize("method", ["ngram", "draft_model", "suffix"])
def test_the_builtin_model_answers_threads(method: str) -> None:
    llm = LLM("builtin", max_model_len=96, seed=0)
    prompts = ["Once upon a time", "The dog", "Lily saw a", "One day, Tom"]
    params = [SamplingParams(temperature=0.7 * (i % 2), seed=i, max_tokens=24) for i in range(len(prompts))]
    alone = [llm.generate(prompt, p)[0].outputs[0].text for prompt, p in zip(prompts, params)]
    llm.use(config(method, "builtin-draft"))

    def task(i: int) -> Callable[[], None]:
        def run() -> None:
            for _ in range(2):
                assert llm.generate(prompts[i], params[i])[0].outputs[0].text == alone[i]
                *_, last = llm.stream(prompts[i], params[i])
                assert last.outputs[0].text == alone[i]

        return run

    together(*(task(i) for i in range(len(prompts))))
    check_idle(llm)


def test_calls_of_several_threads_share_steps(llm: LLM) -> None:
    llm.use(None)
    batches: list[int] = []
    forward, entered = llm.engine.runner.forward, threading.Barrier(3)

    def counted(batch: Any, *given: Any) -> Any:
        batches.append(len(batch))
        return forward(batch, *given)

    llm.engine.runner.forward = counted  # type: ignore[method-assign]

    def run() -> None:
        entered.wait()
        llm.generate({"prompt_token_ids": PROMPTS[0]}, params_of(1, max_tokens=60))

    together(run, run, run)
    assert max(batches) > 1
    check_idle(llm)


# ---- changing the drafter


def test_the_drafter_stays_while_another_thread_runs(llm: LLM, texts: list[list[int]]) -> None:
    llm.use({"method": "ngram"})
    inside, go_on = threading.Event(), threading.Event()

    def slow(output: list[int], logits: Tensor) -> Tensor:
        inside.set()
        assert go_on.wait(60)
        return logits

    def run() -> None:
        llm.generate({"prompt_token_ids": PROMPTS[0]}, params_of(0, logits_processors=[slow]))

    def change() -> None:
        assert inside.wait(60)
        try:
            with pytest.raises(ConfigError, match="running"):
                llm.use(None)
        finally:
            go_on.set()

    together(run, change)
    check_idle(llm)


# ---- steps that fail


def failing(llm: LLM, error: BaseException, after: int = 4) -> Iterator[None]:
    """Let the `after`-th forward from now on raise; the thread that drives gets it."""
    forward, left = llm.engine.runner.forward, [after]

    def broken(*given: Any) -> Any:
        left[0] -= 1
        if left[0] == 0:
            raise error
        return forward(*given)

    llm.engine.runner.forward = broken  # type: ignore[method-assign]
    yield
    llm.engine.runner.forward = forward  # type: ignore[method-assign]


@pytest.mark.parametrize("method", METHODS)
def test_a_failed_step_ends_every_open_request(
    method: str, llm: LLM, texts: list[list[int]], llama: str
) -> None:
    llm.use(config(method, llama))
    ready, seen = threading.Barrier(3), []

    def run() -> None:
        ready.wait()
        try:
            llm.generate({"prompt_token_ids": PROMPTS[1]}, params_of(1, max_tokens=60))
        except (MemoryError, EngineError) as error:
            seen.append(error)

    broken = failing(llm, MemoryError("no room"), after=12)
    next(broken)
    together(run, run, run)
    next(broken, None)
    assert sum(isinstance(error, MemoryError) for error in seen) == 1 and len(seen) >= 1
    for error in seen:
        assert "no room" in str(error) and (isinstance(error, MemoryError) or error.__cause__ is not None)
    check_idle(llm)
    assert answer(llm, PROMPTS[0], PARAMS[0]).outputs[0].token_ids == texts[0]


def test_a_stream_ends_with_the_step_that_another_caller_drove(llm: LLM) -> None:
    llm.use(None)
    stream = llm.stream({"prompt_token_ids": PROMPTS[1]}, PARAMS[1])
    next(stream)
    broken = failing(llm, MemoryError("no room"), after=1)
    next(broken)
    with pytest.raises(MemoryError):
        llm.generate({"prompt_token_ids": PROMPTS[0]}, PARAMS[0])
    next(broken, None)
    with pytest.raises(EngineError, match="MemoryError: no room"):
        next(stream)
    check_idle(llm)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("part", ["forward", "observe", "_ends", "share"])
def test_an_interrupt_ends_the_requests_of_its_caller_only(
    part: str, method: str, llm: LLM, texts: list[list[int]], llama: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm.use(config(method, llama))
    owner = {"forward": llm.engine.runner, "observe": llm.engine.drafter}.get(part, llm.engine.scheduler)
    inner, calls = getattr(owner, part), []

    def interrupted(*given: Any) -> Any:
        calls.append(0)
        found = inner(*given) if part == "_ends" else None
        if len(calls) == 3:
            raise KeyboardInterrupt
        return found if part == "_ends" else inner(*given)

    stream = llm.stream([{"prompt_token_ids": PROMPTS[i]} for i in (1, 2)], [PARAMS[i] for i in (1, 2)])
    next(stream)
    with monkeypatch.context() as patch:
        patch.setattr(owner, part, interrupted)
        with pytest.raises(KeyboardInterrupt):
            llm.generate([{"prompt_token_ids": prompt} for prompt in PROMPTS], PARAMS)
    last = {output.request_id: output for output in stream}
    assert sorted(output.outputs[0].token_ids for output in last.values()) == sorted([texts[1], texts[2]])
    assert all(len(o.outputs[0].token_times) == len(o.outputs[0].token_ids) for o in last.values())
    check_idle(llm)


@pytest.mark.skipif(not hasattr(signal, "SIGUSR1"), reason="needs signals")
@pytest.mark.parametrize("method", METHODS)
def test_interrupts_at_any_moment(method: str, llm: LLM, texts: list[list[int]], llama: str) -> None:
    """Ctrl-C in the main thread, wherever it is just then, while other threads are answered."""
    llm.use(config(method, llama))
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
                caller(llm, texts, seed, rounds=2)()
        except BaseException as error:
            wrong.append(error)

    before = signal.signal(signal.SIGUSR1, interrupt)
    shooter = threading.Thread(target=shoot, daemon=True)
    others = threading.Thread(target=together, args=[partial(answered, i) for i in range(2)], daemon=True)
    try:
        others.start()
        shooter.start()
        end = time.monotonic() + 1.5
        while time.monotonic() < end:
            with suppress(KeyboardInterrupt):
                armed[0] = True
                answer(llm, PROMPTS[1], params_of(1, max_tokens=100))
                armed[0] = False
    finally:
        armed[0] = False
        over.set()
        shooter.join(60)
        others.join(60)
        signal.signal(signal.SIGUSR1, before)
    assert not others.is_alive() and interrupts[0] > 3 and not wrong
    check_idle(llm)
    assert answer(llm, PROMPTS[0], PARAMS[0]).outputs[0].token_ids == texts[0]


# ---- re-entry


def calling(call: Callable[[], Any]) -> Callable[[list[int], Tensor], Tensor]:
    """A processor that makes a call at its third token."""

    def nested(output: list[int], logits: Tensor) -> Tensor:
        if len(output) == 2:
            call()
        return logits

    return nested


@pytest.mark.parametrize("method", ["off", "ngram", "draft_model"])
def test_a_processor_cannot_call_the_engine(
    method: str, llm: LLM, texts: list[list[int]], llama: str
) -> None:
    llm.use(config(method, llama))
    twin = llm.variant(None)
    calls: Mapping[str, Callable[[], Any]] = {
        "generate": lambda: llm.generate({"prompt_token_ids": PROMPTS[3]}, PARAMS[3]),
        "stream": lambda: next(llm.stream({"prompt_token_ids": PROMPTS[3]}, PARAMS[3])),
        "step": llm.engine.step,
        "twin": lambda: twin.generate({"prompt_token_ids": PROMPTS[3]}, PARAMS[3]),
        "variant": lambda: llm.variant(None),
        "use": lambda: llm.use(None),
    }
    for name, call in calls.items():
        bad = params_of(3, logits_processors=[calling(call)])
        outputs = llm.generate(
            [{"prompt_token_ids": PROMPTS[i]} for i in (0, 3, 1)], [PARAMS[0], bad, PARAMS[1]]
        )
        assert [outputs[0].outputs[0].token_ids, outputs[2].outputs[0].token_ids] == texts[:2], name
        assert isinstance(outputs[1].error, RequestError)
        assert ("running" if name == "use" else "inside its own step") in str(outputs[1].error), name
        ids = outputs[1].outputs[0].token_ids
        assert len(ids) <= 2 and ids == texts[3][: len(ids)]
        check_idle(llm)
        check_idle(twin)


def test_a_processor_aborts(llm: LLM, texts: list[list[int]]) -> None:
    llm.use({"method": "ngram"})
    stream = llm.stream({"prompt_token_ids": PROMPTS[0]}, PARAMS[0])
    victim = next(stream).request_id

    def abort(output: list[int], logits: Tensor) -> Tensor:
        llm.abort(victim)
        return logits

    output = answer(llm, PROMPTS[1], params_of(1, logits_processors=[abort]))
    assert output.outputs[0].token_ids == texts[1]
    (last,) = stream
    ids = last.outputs[0].token_ids
    assert last.outputs[0].finish_reason == "abort" and ids == texts[0][: len(ids)]
    check_idle(llm)


def test_the_consumer_of_a_stream_calls_the_engine(llm: LLM, texts: list[list[int]]) -> None:
    llm.use({"method": "ngram"})
    for output in llm.stream({"prompt_token_ids": PROMPTS[0]}, PARAMS[0]):
        assert answer(llm, PROMPTS[1], PARAMS[1]).outputs[0].token_ids == texts[1]
        ids = output.outputs[0].token_ids
        assert ids == texts[0] or not output.finished
    check_idle(llm)


# ---- what a server builds on


def test_one_thread_drives_for_all(llm: LLM, texts: list[list[int]]) -> None:
    """The driver sleeps while there is nothing to do; request ids are arbitrary; progress is reported."""
    llm.use({"method": "ngram"})
    driver, loop, closed, lock = (
        EngineDriver(llm),
        EngineLoop(llm.engine),
        threading.Event(),
        threading.Lock(),
    )
    lengths: dict[str, list[int]] = {}

    def listener(rows: list[Row]) -> Callable[[], None]:
        def note() -> None:
            with lock:
                lengths.setdefault(rows[0].id, []).append(len(rows[0].output))

        return note

    def close() -> None:
        closed.set()
        loop.wake()

    def task() -> None:
        try:
            for i in range(6):
                request = driver.make_request(PROMPTS[i], PARAMS[i], request_id=f"chat-é {i}")
                ticket = loop.submit(request.rows, listener(request.rows))
                if i == 3:
                    with pytest.raises(RequestError, match="belongs to a request"):
                        loop.submit(request.rows)
                    loop.abort(request.id)
                loop.run_until(lambda ticket=ticket: ticket.finished)  # type: ignore[misc]
                ids = request.rows[0].output
                assert ids == texts[i][: len(ids)] and (i == 3 or ids == texts[i])
                assert lengths[request.id][-1] == len(ids)
        finally:
            close()

    together(lambda: loop.run_until(closed.is_set), task)
    check_idle(llm)


def test_a_listener_that_fails_ends_its_request_alone(llm: LLM, texts: list[list[int]]) -> None:
    llm.use(None)

    def gone() -> None:
        raise ConnectionError("gone")

    driver, loop = EngineDriver(llm), EngineLoop(llm.engine)
    first, second = (driver.make_request(PROMPTS[i], PARAMS[i]) for i in range(2))
    loop.submit(first.rows, gone)
    ticket = loop.submit(second.rows)
    loop.run_until(lambda: ticket.finished)
    assert second.output().outputs[0].token_ids == texts[1]
    assert first.rows[0].finish_reason == "abort"
    check_idle(llm)


def test_errors_have_one_root() -> None:
    assert issubclass(EngineError, OutriderError)
