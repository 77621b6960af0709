"""A step in flight between two calls of `Engine.step`, as on a device: same texts, no read before its end.

`Engine.ahead` is set by hand: on a CPU a step is over when it has begun.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from drafter_cases import PlainOutputs
from helpers import answer
from hybrid_texts import Case
from hybrid_texts import prompts as hybrid_prompts
from hybrid_texts import sampling as hybrid_sampling
from syncs import Syncs
from torch import Tensor

from outrider import LLM, SamplingParams
from outrider.backends.torch import sampling, verifier
from outrider.control.auto import AutoController
from outrider.core.block_table import PAGE
from outrider.core.device import HostCopy
from outrider.errors import EngineError
from outrider.testing import EngineDriver, check_idle, random_prompts, run_staggered, visible_parts

PROMPTS = random_prompts(5, seed=6, longest=30)
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)


def params(i: int, **more: Any) -> SamplingParams:
    return SamplingParams(temperature=0.8 * (i % 2), seed=i, max_tokens=24, ignore_eos=True, **more)


@pytest.fixture
def ahead(llama: str) -> LLM:
    llm = LLM(llama, max_num_seqs=3, enable_prefix_caching=False)
    llm.engine.ahead = True
    return llm


class Recorded(HostCopy):
    """Records when a copy to the host is asked for, and when it is waited for."""

    events: ClassVar[list[str]] = []

    def __init__(self, tensor: Tensor) -> None:
        self.events.append("launch")
        super().__init__(tensor)

    def tolist(self) -> list[int]:
        self.events.append("wait")
        return super().tolist()


def test_a_step_is_passed_on_while_the_next_one_is_computed(
    llama: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And nothing is read from the device but the tokens of a step, when it is waited for."""
    monkeypatch.setenv("OUTRIDER_KERNELS", "torch")
    seen = Syncs()
    monkeypatch.setattr(verifier, "HostCopy", Recorded)
    monkeypatch.setattr(sampling, "FIRST_LOOKS", {})
    llm = LLM(llama, enable_prefix_caching=False)
    llm.engine.decoder.backend.verifier = verifier.TreeVerifier()  # type: ignore[misc]
    llm.use({"method": "ngram", "num_speculative_tokens": 3})
    expected = answer(llm, PROMPTS[0], GREEDY).outputs[0].token_ids
    Recorded.events.clear()
    llm.engine.ahead, steps = True, llm.engine.steps
    request = EngineDriver(llm).make_request(PROMPTS[0], GREEDY)
    ticket = llm.loop.submit(request.rows, lambda: Recorded.events.append("news"))
    with seen:
        llm.loop.run_until(lambda: ticket.finished)
    steps = llm.engine.steps - steps
    assert request.output().outputs[0].token_ids == expected
    assert Recorded.events == ["launch", "wait", *["launch", "news", "wait"] * (steps - 1), "news"]
    assert seen.seen == ["tolist"] * steps
    check_idle(llm)


def always_settling(controller: AutoController) -> list[bool]:
    """Let it make plans beside every step, unless it rests.  Returns whether it did, by step."""
    settle, settled = controller.settle, list[bool]()

    def forced(computes: bool = True) -> None:
        controller.due = controller.rest is None and bool(controller.log)
        settled.append(controller.due)
        settle(computes)
        controller.interval = 99  # nothing else takes in the log

    controller.settle = forced  # type: ignore[method-assign]
    return settled


@pytest.mark.parametrize("method", ["off", "ngram", "draft_model", "auto"])
def test_texts_are_those_of_steps_that_are_waited_for(
    method: str, ahead: LLM, outputs_of: PlainOutputs, random_draft: str
) -> None:
    """Requests that come and go, one of them by a stop token that ends a step early, one aborted."""
    first = visible_parts(outputs_of(PROMPTS[0], params(0)).outputs)
    stop = outputs_of(PROMPTS[0], params(0)).outputs[0].token_ids[9]
    each = [params(i, stop_token_ids=[stop] if i == 0 else None) for i in range(len(PROMPTS))]
    expected = [visible_parts(outputs_of(prompt, p).outputs) for prompt, p in zip(PROMPTS, each)]
    more = {"draft_model": {"model": random_draft}, "auto": {"drafters": [{"model": random_draft}]}}
    ahead.use({"method": method, **more.get(method, {})})
    ahead.engine.ahead = True
    settled = [always_settling(controller) for controller in ahead.engine.adaptive]
    found = run_staggered(ahead, PROMPTS, each, aborts={3: 5})
    assert expected[0] != first
    assert all(any(each) for each in settled)
    assert [visible_parts(o.outputs) for i, o in enumerate(found) if i != 3] == expected[:3] + expected[4:]
    assert found[3].outputs[0].finish_reason == "abort"
    whole = outputs_of(PROMPTS[3], each[3]).outputs[0].token_ids
    assert found[3].outputs[0].token_ids == whole[: len(found[3].outputs[0].token_ids)]
    check_idle(ahead)


@pytest.mark.parametrize("kind", ["off", "hidden", "wide"])
def test_texts_of_a_hybrid_are_those_of_steps_that_are_waited_for(kind: str, tmp_path: Path) -> None:
    """States, their replays and snapshots, of requests that come and go, one of them aborted."""
    case = Case("qwen3.5", tmp_path)
    given, params = hybrid_prompts(), hybrid_sampling(0.8)
    expected = case.expected(given, params)
    case.llm.use(None if kind == "off" else case.script(kind, 6, 3))
    case.llm.engine.ahead = True
    for aborts in ({3: 4}, {}):
        found = run_staggered(case.llm, given, params, aborts=aborts)
        for i, output in enumerate(found):
            assert i in aborts or visible_parts(output.outputs) == expected[i]
        check_idle(case.llm)
    assert case.llm.engine.scheduler.prefix_hits


def test_a_stop_string_ends_a_request_with_a_step_in_flight() -> None:
    """In the middle of a step's tokens, and beside a request that goes on."""
    prompts = ["The future of AI is", "Once upon a time"]
    llm = LLM("builtin-draft", max_num_seqs=2, enable_prefix_caching=False)
    free = [SamplingParams(temperature=0.8, seed=i, max_tokens=40, ignore_eos=True) for i in range(2)]
    whole = [llm.generate(prompt, p)[0].outputs[0].text for prompt, p in zip(prompts, free)]
    each = [replace(free[0], stop=[whole[0][30:36]]), free[1]]
    expected = [visible_parts(llm.generate(prompt, p)[0].outputs) for prompt, p in zip(prompts, each)]
    llm.use({"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1})
    llm.engine.ahead = True
    found = run_staggered(llm, [llm.tokenizer.encode(prompt) for prompt in prompts], each)
    assert [visible_parts(output.outputs) for output in found] == expected
    sample = found[0].outputs[0]
    assert sample.finish_reason == "stop" and sample.stop_reason == whole[0][30:36]
    assert (
        whole[0].startswith(sample.text) and len(sample.text) <= 30 and found[1].outputs[0].text == whole[1]
    )
    check_idle(llm)


def test_rows_are_preempted_between_steps(llama: str, outputs_of: PlainOutputs) -> None:
    pages = 96 // PAGE + 3
    size = LLM(llama, max_model_len=96).engine.decoder.footprint.total() * PAGE
    llm = LLM(llama, max_num_seqs=4, max_model_len=96, kv_cache_memory_bytes=pages * size)
    llm.use({"method": "ngram", "num_speculative_tokens": 4})
    llm.engine.ahead, each = True, [params(i) for i in range(len(PROMPTS))]
    found = run_staggered(llm, PROMPTS, each)
    expected = [visible_parts(outputs_of(prompt, p).outputs) for prompt, p in zip(PROMPTS, each)]
    assert [visible_parts(output.outputs) for output in found] == expected
    assert llm.engine.scheduler.preemptions
    check_idle(llm)


def test_a_step_in_flight_whose_rows_are_all_aborted_is_dropped(ahead: LLM) -> None:
    driver = EngineDriver(ahead)
    one, other = (driver.add_request(prompt, GREEDY) for prompt in PROMPTS[:2])
    driver.step()
    driver.finish(one)
    assert ahead.engine.flights and ahead.engine.busy, "the other row is in the same step"
    driver.step()
    driver.finish(other)
    check_idle(ahead)
    assert answer(ahead, PROMPTS[2], GREEDY).outputs[0].token_ids


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_a_step_ahead_that_raises_loses_no_finished_request(
    error: type[BaseException], ahead: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first request ends in the step before; the second is computed again after an interrupt."""
    expected = [answer(ahead, prompt, GREEDY).outputs[0].token_ids for prompt in PROMPTS[:2]]
    driver, begin = EngineDriver(ahead), ahead.engine.runner.begin
    short = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
    requests = [driver.make_request(prompt, p) for prompt, p in zip(PROMPTS, (short, GREEDY))]
    tickets = [ahead.loop.submit(request.rows) for request in requests]
    begun = list[int]()

    def failing(*args: Any) -> Any:
        begun.append(1)
        if len(begun) == 3:
            raise error("no")
        return begin(*args)

    monkeypatch.setattr(ahead.engine.runner, "begin", failing)
    with pytest.raises(error, match="no"):
        ahead.loop.run_until(lambda: all(ticket.finished for ticket in tickets))
    ahead.loop.run_until(lambda: all(ticket.finished for ticket in tickets))
    outputs = [request.output().outputs[0] for request in requests]
    assert outputs[0].token_ids == expected[0][:2] and outputs[0].finish_reason == "length"
    if error is KeyboardInterrupt:
        assert outputs[1].token_ids == expected[1]
    else:
        assert isinstance(requests[1].output().error, EngineError)
    check_idle(ahead)


def test_a_copy_holds_the_numbers_of_its_tensor() -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    assert HostCopy(torch.arange(5, device=device)).tolist() == [0, 1, 2, 3, 4]
