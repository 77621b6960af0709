"""An interrupt at any line of a step: the step is repeated, and no text changes."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from helpers import answer
from scene import outcome
from torch import Tensor

from outrider import LLM, SamplingParams
from outrider.core.block_table import PAGE
from outrider.testing import EngineDriver, KnownTexts, Scripts, check_idle

PROMPTS = [[17 + 5 * i + j * (i + 1) for j in range(14)] for i in range(4)]
ROOMS = ("/outrider/engine/", "/outrider/verify/", "/outrider/cache/", "/outrider/core/row.py")
LOCK = "turn.py"  # which a tracing function leaves locked, and a signal does not
STRIDE = 16  # one in so many lines is interrupted

Place = tuple[str, int]  # file and line


def boom(ids: list[int], logits: Tensor) -> Tensor:
    if len(ids) >= 5:
        raise ValueError("no such state")
    return logits


PARAMS = [
    SamplingParams(temperature=0.8, seed=5, max_tokens=10, logprobs=1, prompt_logprobs=0, ignore_eos=True),
    SamplingParams(temperature=0, seed=5, max_tokens=10, logits_processors=[boom], ignore_eos=True),
    SamplingParams(temperature=0, seed=5, max_tokens=10, n=2, presence_penalty=1.0, stop=["zz"]),
    SamplingParams(temperature=0.8, seed=5, max_tokens=8, structured_outputs={"regex": "[a-z ]{3,9}"}),
]


@contextmanager
def traced(llm: LLM, at_line: Callable[[Place], None]) -> Iterator[None]:
    """Call `at_line` before each line of the rooms that a step runs."""
    step = llm.engine.step

    def local(frame: FrameType, event: str, _: Any) -> Any:
        if event == "line":
            at_line((frame.f_code.co_filename, frame.f_lineno))
        return local

    def called(frame: FrameType, *_: Any) -> Any:
        file = frame.f_code.co_filename
        return local if any(room in file for room in ROOMS) and not file.endswith(LOCK) else None

    def run() -> Any:
        before = sys.gettrace()
        sys.settrace(called)
        try:
            return step()
        finally:
            sys.settrace(before)

    llm.engine.step = run  # type: ignore[method-assign]
    try:
        yield
    finally:
        llm.engine.step = step  # type: ignore[method-assign]


def answered(llm: LLM) -> list[Any]:
    """The outcome of every prompt, answered together through any number of interrupts."""
    llm.engine.forget_prefixes()
    driver = EngineDriver(llm)
    requests = [driver.make_request(ids, p) for ids, p in zip(PROMPTS, PARAMS)]
    tickets = [llm.loop.submit(request.rows) for request in requests]
    while not all(ticket.finished for ticket in tickets):
        assert llm.engine.busy, "a request is lost"
        try:
            llm.loop.run_until(lambda: all(ticket.finished for ticket in tickets))
        except KeyboardInterrupt:
            llm.engine.check()
    check_idle(llm)
    return [outcome(request.output()) for request in requests]


def test_an_interrupt_at_any_line_of_a_step_changes_no_text(llama: str, plain: LLM) -> None:
    truth = KnownTexts()
    for prompt, p in zip(PROMPTS, PARAMS):
        free = SamplingParams(**{**vars(p), "logits_processors": None, "logprobs": None, "stop": None})
        truth.learn(prompt, 5, answer(plain, prompt, free).outputs)
    slot = plain.engine.decoder.footprint.total()
    room = {"max_model_len": 64, "kv_cache_memory_bytes": 4 * PAGE * slot}
    tight = LLM(llama, max_num_seqs=3, max_num_batched_tokens=24, **room)
    script = {"method": "scripted", "script": Scripts(truth).hidden, "num_speculative_tokens": 4}
    tight.use({**script, "nodes": 12})
    places = dict[Place, int]()

    def note(place: Place) -> None:
        places[place] = places.get(place, 0) + 1

    with traced(tight, note):
        expected = answered(tight)
    assert len(places) > 300
    for number, (place, times) in enumerate(sorted(places.items())[::STRIDE]):
        left = [number % times + 1]

        def interrupt(at: Place, place: Place = place, left: list[int] = left) -> None:
            left[0] -= at == place
            if at == place and left[0] == 0:
                raise KeyboardInterrupt

        with traced(tight, interrupt):
            assert answered(tight) == expected, place
