"""Several threads on one model: every text is the one that a call alone gives, and nothing leaks."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from helpers import answer
from threads import METHODS, PARAMS, PROMPTS, caller, config, params_of, together
from torch import Tensor

from outrider import LLM, ConfigError, EngineError, RequestError, RequestOutput, SamplingParams
from outrider.core.row import Row
from outrider.engine.loop import EngineLoop
from outrider.errors import OutriderError
from outrider.testing import EngineDriver, check_idle


@pytest.mark.parametrize("method", METHODS)
def test_texts_do_not_depend_on_other_threads(
    method: str, shared: LLM, texts: list[list[int]], llama: str
) -> None:
    shared.use(config(method, llama))
    together(*(caller(shared, texts, seed) for seed in range(6)))
    check_idle(shared)


def test_variants_in_several_threads_emit_their_own_texts(
    shared: LLM, texts: list[list[int]], llama: str
) -> None:
    """Engines on the same weights share the scratch of the kernels."""
    twins = [shared.variant(config(method, llama)) for method in METHODS[1:]]
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


def test_calls_of_several_threads_share_steps(shared: LLM) -> None:
    shared.use(None)
    batches: list[int] = []
    forward, entered = shared.engine.runner.begin, threading.Barrier(4)

    def counted(batch: Any, *given: Any) -> Any:
        batches.append(len(batch))
        return forward(batch, *given)

    shared.engine.runner.begin = counted  # type: ignore[method-assign]

    def run() -> None:
        entered.wait()
        shared.generate({"prompt_token_ids": PROMPTS[0]}, params_of(1, max_tokens=60))

    def hold() -> None:
        """Let no step begin until all have called."""
        with shared.engine.turn.lock:
            entered.wait()
            while len(shared.loop.tickets) < 3:
                time.sleep(0.001)

    together(hold, run, run, run)
    assert max(batches) > 1
    check_idle(shared)


# ---- changing the drafter


def test_the_drafter_stays_while_another_thread_runs(shared: LLM, texts: list[list[int]]) -> None:
    shared.use({"method": "ngram"})
    inside, go_on = threading.Event(), threading.Event()

    def slow(output: list[int], logits: Tensor) -> Tensor:
        inside.set()
        assert go_on.wait(60)
        return logits

    def run() -> None:
        shared.generate({"prompt_token_ids": PROMPTS[0]}, params_of(0, logits_processors=[slow]))

    def change() -> None:
        assert inside.wait(60)
        try:
            with pytest.raises(ConfigError, match="running"):
                shared.use(None)
        finally:
            go_on.set()

    together(run, change)
    check_idle(shared)


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
    method: str, shared: LLM, texts: list[list[int]], llama: str
) -> None:
    shared.use(config(method, llama))
    twin = shared.variant(None)
    calls: Mapping[str, Callable[[], Any]] = {
        "generate": lambda: shared.generate({"prompt_token_ids": PROMPTS[3]}, PARAMS[3]),
        "stream": lambda: next(shared.stream({"prompt_token_ids": PROMPTS[3]}, PARAMS[3])),
        "step": shared.engine.step,
        "twin": lambda: twin.generate({"prompt_token_ids": PROMPTS[3]}, PARAMS[3]),
        "variant": lambda: shared.variant(None),
        "use": lambda: shared.use(None),
    }
    for name, call in calls.items():
        bad = params_of(3, logits_processors=[calling(call)])
        outputs = shared.generate(
            [{"prompt_token_ids": PROMPTS[i]} for i in (0, 3, 1)], [PARAMS[0], bad, PARAMS[1]]
        )
        assert [outputs[0].outputs[0].token_ids, outputs[2].outputs[0].token_ids] == texts[:2], name
        assert isinstance(outputs[1].error, RequestError)
        assert ("running" if name == "use" else "inside its own step") in str(outputs[1].error), name
        ids = outputs[1].outputs[0].token_ids
        assert len(ids) <= 2 and ids == texts[3][: len(ids)]
        check_idle(shared)
        check_idle(twin)


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads wait for a processor for a moment only."""
    monkeypatch.setattr("outrider.engine.turn.STALL", 0.1)
    monkeypatch.setattr("outrider.engine.loop.MAX_WAIT", 0.05)


@pytest.mark.usefixtures("impatient")
def test_a_processor_that_waits_for_a_caller_of_its_engine_fails(shared: LLM, texts: list[list[int]]) -> None:
    """The caller gives up, and the processor gets its error; without that neither would end."""
    shared.use(None)
    with ThreadPoolExecutor(1) as pool:

        def wait() -> None:
            pool.submit(answer, shared, PROMPTS[1], PARAMS[1]).result()

        bad = params_of(3, logits_processors=[calling(wait)])
        outputs = shared.generate([{"prompt_token_ids": PROMPTS[i]} for i in (0, 3)], [PARAMS[0], bad])
    assert outputs[0].outputs[0].token_ids == texts[0]
    assert isinstance(outputs[1].error, RequestError) and "may wait for it" in str(outputs[1].error)
    assert len(outputs[1].outputs[0].token_ids) == 2
    check_idle(shared)


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("call", ["variant", "generate on a variant"])
def test_a_processor_that_waits_for_a_variant_of_its_engine_fails(
    call: str, shared: LLM, texts: list[list[int]]
) -> None:
    shared.use(None)
    twin = shared.variant(None)
    with ThreadPoolExecutor(1) as pool:

        def wait() -> None:
            if call == "variant":
                pool.submit(shared.variant, None).result()
            else:
                pool.submit(answer, twin, PROMPTS[1], PARAMS[1]).result()

        bad = params_of(3, logits_processors=[calling(wait)])
        outputs = shared.generate([{"prompt_token_ids": PROMPTS[i]} for i in (0, 3)], [PARAMS[0], bad])
    assert outputs[0].outputs[0].token_ids == texts[0]
    assert isinstance(outputs[1].error, RequestError) and "may wait for it" in str(outputs[1].error)
    assert answer(twin, PROMPTS[1], PARAMS[1]).outputs[0].token_ids == texts[1]
    check_idle(shared)
    check_idle(twin)


@pytest.mark.usefixtures("impatient")
def test_a_slow_processor_fails_no_call_that_came_before_it(shared: LLM, texts: list[list[int]]) -> None:
    shared.use(None)
    with ThreadPoolExecutor(1) as pool:
        waiting: list[Future[RequestOutput]] = []

        def slow(output: list[int], logits: Tensor) -> Tensor:
            if not output:
                waiting.append(pool.submit(answer, shared, PROMPTS[1], PARAMS[1]))
                while len(shared.loop.tickets) < 2:
                    time.sleep(0.001)
            elif len(output) == 2:
                time.sleep(0.5)
            return logits

        assert answer(shared, PROMPTS[3], params_of(3, logits_processors=[slow])).error is None
        assert waiting[0].result().outputs[0].token_ids == texts[1]
    check_idle(shared)


def test_a_processor_may_use_another_engine(shared: LLM, llama: str, texts: list[list[int]]) -> None:
    shared.use(None)
    other = LLM(llama, dtype="float32", seed=0)
    inner = params_of(1, logits_processors=[lambda output, logits: logits])
    outer = params_of(3, logits_processors=[calling(lambda: answer(other, PROMPTS[1], inner))])
    outputs = shared.generate([{"prompt_token_ids": PROMPTS[i]} for i in (0, 3)], [PARAMS[0], outer])
    assert [output.outputs[0].token_ids for output in outputs] == [texts[0], texts[3]]
    check_idle(shared)


def test_a_processor_may_abort_another_request(shared: LLM, texts: list[list[int]]) -> None:
    shared.use({"method": "ngram"})
    stream = shared.stream({"prompt_token_ids": PROMPTS[0]}, params_of(0, max_tokens=100))
    victim = next(stream).request_id

    def abort(output: list[int], logits: Tensor) -> Tensor:
        shared.abort(victim)
        return logits

    output = answer(shared, PROMPTS[1], params_of(1, logits_processors=[abort]))
    assert output.outputs[0].token_ids == texts[1]
    (last,) = stream
    ids = last.outputs[0].token_ids
    assert last.outputs[0].finish_reason == "abort" and ids[: len(texts[0])] == texts[0][: len(ids)]
    check_idle(shared)


def test_the_consumer_of_a_stream_calls_the_engine(shared: LLM, texts: list[list[int]]) -> None:
    shared.use({"method": "ngram"})
    for output in shared.stream({"prompt_token_ids": PROMPTS[0]}, PARAMS[0]):
        assert answer(shared, PROMPTS[1], PARAMS[1]).outputs[0].token_ids == texts[1]
        ids = output.outputs[0].token_ids
        assert ids == texts[0] or not output.finished
    check_idle(shared)


# ---- what a server builds on


def test_one_thread_drives_for_all(shared: LLM, texts: list[list[int]]) -> None:
    """The driver sleeps while there is nothing to do; request ids are arbitrary; progress is reported."""
    shared.use({"method": "ngram"})
    driver, loop, closed, lock = (
        EngineDriver(shared),
        EngineLoop(shared.engine),
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
    check_idle(shared)


def test_a_listener_that_fails_ends_its_request_alone(shared: LLM, texts: list[list[int]]) -> None:
    shared.use(None)

    def gone() -> None:
        raise ConnectionError("gone")

    driver, loop = EngineDriver(shared), EngineLoop(shared.engine)
    first, second = (driver.make_request(PROMPTS[i], PARAMS[i]) for i in range(2))
    loop.submit(first.rows, gone)
    ticket = loop.submit(second.rows)
    loop.run_until(lambda: ticket.finished)
    assert second.output().outputs[0].token_ids == texts[1]
    assert first.rows[0].finish_reason == "abort"
    check_idle(shared)


def test_errors_have_one_root() -> None:
    assert issubclass(EngineError, OutriderError)
